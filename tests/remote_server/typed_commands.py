"""Flags as `kvferry` reads them, without running the command."""

import argparse
from collections.abc import Sequence

from remote_server.cli.commands import COMMANDS, load
from remote_server.cli.parser import Parser, parser_of


def parser_for(command: str) -> Parser:
    return parser_of(load(command), f"kvferry {command}", COMMANDS[command])


def flags_of(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """An unknown flag ends in `SystemExit`."""
    return parser_for(command).flags_in(arguments)
