"""`kvferry`, or `python -m remote_server.cli`: one program for all commands."""

import os
import sys
from collections.abc import Callable, Sequence

from remote_server.cli.commands import COMMANDS, GROUPS, load
from remote_server.cli.exit_status import INTERRUPTED, WRONG_USAGE, YES, status_of
from remote_server.cli.output import name_program, print_error, print_lines
from remote_server.cli.parser import nearest, parser_of
from remote_server.errors import KVFerryError

PROGRAM = "kvferry"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command in `arguments`, which are those of the process if None."""
    return _ended(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name in COMMANDS:
        return _run(name, given[1:], f"{PROGRAM} {name}")
    name_program(PROGRAM)
    if name in ("-h", "--help", "help"):
        print_lines(*_help())
        return YES
    if name in ("-V", "--version"):
        from remote_server.version import version

        print_lines(f"{PROGRAM} {version()}")
        return YES
    if name:
        kind = "flag" if name.startswith("-") else "command"
        print_error(f"unknown {kind} {name!r:.80}{nearest(name, [*COMMANDS])}")
        print_error(f"`{PROGRAM} --help` lists the commands")
    else:
        print_lines(*_help())
    return WRONG_USAGE


def run(name: str, arguments: Sequence[str], prog: str) -> int:
    """The exit status of one command. `prog` is the command as its user typed it, for errors."""
    return _ended(lambda: _run(name, arguments, prog))


def _run(name: str, arguments: Sequence[str], prog: str) -> int:
    name_program(prog)
    command = load(name)
    return command.run(parser_of(command, prog, COMMANDS[name]).flags_in(arguments))


def _ended(does: Callable[[], int]) -> int:
    """What it returns, or the exit status of how it ended."""
    try:
        status = does()
        sys.stdout.flush()
        return status
    except KVFerryError as error:
        print_error(str(error))
        return status_of(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `kvferry stats | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return YES


def _help() -> list[str]:
    width = max(map(len, COMMANDS))
    lines = [f"usage: {PROGRAM} COMMAND [OPTION ...]", "", "A KV cache beside vLLM engines."]
    for group, commands in GROUPS.items():
        lines += [
            "",
            f"{group}:",
            *(f"    {name:<{width}}  {text}" for name, text in commands.items()),
        ]
    return [
        *lines, "",
        f"`{PROGRAM} COMMAND --help` has the flags of a command, and examples.",
        f"`{PROGRAM} --version` prints the version.",
        "Exit status: 0 yes, 1 no, 2 wrong usage, 3 no server answered.",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
