"""`kvferry completion`: a script for a shell that completes commands, flags and their choices."""

import argparse
from collections.abc import Iterator

from remote_server.cli.commands import COMMANDS, load
from remote_server.cli.exit_status import YES
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.errors import ConfigError

SHELLS = ("bash", "zsh")


def add_flags(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def run(flags: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ConfigError("shtab is missing: pip install shtab") from None
    parser = whole_parser()
    for action in _actions_of(parser):
        name = str(action.metavar)
        if name.startswith("{"):  # the words of a setting, which the setting itself checks
            action.choices = name.strip("{}").split(",")
        kind = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY}.get(name)
        if kind is not None:
            action.complete = kind  # type: ignore[attr-defined]
    print_lines(*shtab.complete(parser, shell=flags.shell).split("\n"))
    return YES


def whole_parser() -> Parser:
    """One parser with every command and every flag."""
    parser = Parser(prog="kvferry")
    parser.add_argument("--version", action="store_true", help="print the version")
    below = parser.add_subparsers()
    for name, text in COMMANDS.items():
        load(name).add_flags(below.add_parser(name, help=text))
    return parser


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions_of(below)


COMMAND = Command(
    add_flags,
    run,
    description="Print a script that completes kvferry's commands, flags and choices.",
    examples="""\
kvferry completion bash > ~/.local/share/bash-completion/completions/kvferry
kvferry completion zsh > ~/.zfunc/_kvferry       # a folder of $fpath
""",
)
