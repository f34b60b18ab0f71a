"""`kvferry keys`: make key files for a server and its tenants."""

import argparse
from collections.abc import Sequence
from typing import Any

from remote_server import keys


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "keys", help="make key files for a server and its tenants", add_help=False
    )
    parser.set_defaults(run=lambda _: run_with(["--help"]))


def run_with(arguments: Sequence[str]) -> int:
    """It reads its own flags, as `python -m remote_server.keys` does."""
    return keys.main(arguments, prog="kvferry keys")
