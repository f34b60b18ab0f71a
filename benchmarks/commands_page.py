"""`python -m benchmarks.commands_page docs/commands.md`: writes the page from the commands' flags.

Flags that most commands share are explained once. The settings of a server have a page of their
own.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from remote_server.cli.commands import COMMANDS, GROUPS, load
from remote_server.cli.parser import Parser, parser_of
from remote_server.server.config import ServerConfig

_HEAD = """\
# Commands

`kvferry COMMAND --help` prints the flags of one command, with examples. `kvferry --version` prints
the version, and `kvferry completion bash` a script that completes all of this in a shell.

| exit status | meaning |
|---|---|
| 0 | yes, done, healthy |
| 1 | no: a check failed, or nothing was found |
| 2 | wrong usage: an invalid flag, setting or file |
| 3 | no server answered |

Results go to stdout, errors and progress to stderr. Most commands take:

| flag | meaning |
|---|---|
"""

_SHARED = ("--server", "--timeout-s", "--json")


def page() -> str:
    """The page of all commands."""
    lines = [_HEAD + "\n".join(_rows(_parser("watch"), only=_SHARED))]
    for title, commands in GROUPS.items():
        lines += ["", f"## {title[:1].upper()}{title[1:]}"]
        for name in commands:
            lines += ["", *_section(name)]
    return "\n".join(lines) + "\n"


def _section(name: str) -> Iterator[str]:
    command, parser = load(name), _parser(name)
    yield f"### `kvferry {name}`"
    yield ""
    yield command.description or f"{COMMANDS[name][:1].upper()}{COMMANDS[name][1:]}."
    if command.notes:
        yield from ["", command.notes]
    if name == "serve":
        yield from ["", "[settings.md](settings.md) has the flags that are settings."]
    yield from ["", "```", command.examples.rstrip(), "```"]
    rows = [*_rows(parser, without=ServerConfig.__struct_fields__ if name == "serve" else ())]
    if rows:
        yield from ["", "| flag | meaning |", "|---|---|", *rows]


def _rows(
    parser: argparse.ArgumentParser, *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Iterator[str]:
    """Those of arguments and flags, but for shared ones and those `without`; or `only` some."""
    for action in sorted(parser._actions, key=lambda one: bool(one.option_strings)):
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield f"| `{name}` | {_cell(below.description or '')} |"
                yield from (row.replace("| `", f"| `{name} … ", 1) for row in _rows(below))
            continue
        is_shared = bool({*_SHARED}.intersection(action.option_strings))
        if action.dest == "help" or is_shared != bool(only):
            continue
        if action.dest not in without:
            text = parser._get_formatter()._expand_help(action) if action.help else ""
            yield f"| `{_cell(_shown(action))}` | {_cell(text)} |"


def _shown(action: argparse.Action) -> str:
    place = str(action.metavar or (", ".join(action.choices) if action.choices else action.dest))
    if not action.option_strings:
        return f"[{place}]" if action.nargs in ("?", "*") else place
    takes = "" if action.nargs == 0 else f" {place}"
    return f"{', '.join(action.option_strings)}{takes}"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def _parser(name: str) -> Parser:
    return parser_of(load(name), f"kvferry {name}", COMMANDS[name])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.commands_page",
        description="Write the page of the commands, from their flags.",
    )
    parser.add_argument("page", type=Path, metavar="PAGE.md", help="written anew")
    path: Path = parser.parse_args(arguments).page
    path.write_text(page())


if __name__ == "__main__":
    main()
