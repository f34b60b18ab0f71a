"""The parser of a command's flags: help pages for people, and errors of two lines.

argparse of the standard library does the work. It starts in 10 ms; click takes 50 and typer 90,
before either has parsed anything.
"""

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from remote_server.cli.exit_status import WRONG_USAGE
from remote_server.cli.output import name_program, print_error, width

LISTED_FLAGS = 8
"""With more, the line of usage does not list them: the groups below it do."""

WIDEST = 100
"""Columns of a help page at most."""


class Command(NamedTuple):
    """One command of `kvferry`: its flags, and the function that runs it."""

    add_flags: Callable[["Parser"], None]

    run: Callable[[argparse.Namespace], int]
    """Returns the exit status. Raises `KVFerryError`."""

    description: str = ""
    """Below the usage on the help page. Empty: the line in the list of commands."""

    examples: str = ""
    """Lines at the end of the help page; a `#` begins the remark of a line."""

    notes: str = ""
    """A paragraph above the examples."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the command that was typed, the nearest flag there is,
    and the help page. `flags_in` ends the process with `WRONG_USAGE`."""

    def __init__(self, *, notes: str = "", examples: str = "", **options: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)
        self.description = _filled(self.description or "")
        shown = f"examples:\n{textwrap.indent(examples.strip(), '  ')}" if examples else ""
        self.epilog = "\n\n".join(filter(None, (_filled(notes), shown)))

    def format_help(self) -> str:
        flags = [action for action in self._actions if action.option_strings]
        if self.usage is None and len(flags) > LISTED_FLAGS:
            places = " ".join(map(_place, self._get_positional_actions()))
            self.usage = f"{self.prog} [OPTION ...] {places}".rstrip().replace("%", "%%")
        return super().format_help()

    def flags_in(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The flags in `arguments`. An unknown one is an error that names the nearest."""
        flags, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return flags

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r:.80}"
        name = argument.split("=")[0]
        known = [*_flags_of(self)]
        return f"unknown flag {name}{nearest(name, known)}"

    def error(self, message: str) -> NoReturn:
        """Two lines: the mistake, and the command that lists the flags."""
        message = re.sub(r"^argument ([^:]+): ", r"\1: ", message)
        message = message.replace("the following arguments are required: ", "missing: ")
        name_program(self.prog)
        print_error(message)
        print_error(f"`{self.prog} --help` lists the flags, with examples")
        sys.exit(WRONG_USAGE)


def parser_of(command: Command, prog: str, text: str) -> Parser:
    """The parser of `command`; `text` is its line in the list of commands."""
    parser = Parser(
        prog=prog,
        description=command.description or f"{text[:1].upper()}{text[1:]}.",
        notes=command.notes,
        examples=command.examples,
    )
    command.add_flags(parser)
    return parser


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean --memory?`, or "" when nothing resembles `name`."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {found[0]}?" if found else ""


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """With those of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _flags_of(below)


def _place(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _columns() -> int:
    return min(width(), WIDEST)


def _filled(text: str) -> str:
    return textwrap.fill(text, _columns() - 2, break_long_words=False, break_on_hyphens=False)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Short columns for flags, so that their texts have room."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Addresses and flags stay whole."""
        text = " ".join(text.split())
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
