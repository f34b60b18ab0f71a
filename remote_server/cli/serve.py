"""`kvferry serve`: run one cache server, as `python -m remote_server` does."""

import argparse
from collections.abc import Sequence
from typing import Any

from remote_server import __main__ as server_main


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve", help="run one cache server in the foreground", add_help=False
    )
    parser.set_defaults(run=lambda _: run_with(["--help"]))


def run_with(arguments: Sequence[str]) -> int:
    """The exit status of the server."""
    return server_main.main(arguments, prog="kvferry serve")
