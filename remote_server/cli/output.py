"""Output of the commands: results on stdout, errors on stderr, nothing that a terminal obeys."""

import os
import shutil
import sys

from remote_server.plain_text import plain

_CODES = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}

_program = "kvferry"


def name_program(prog: str) -> None:
    """Errors begin with `prog` from now on: the command as its user typed it."""
    global _program
    _program = prog


def is_terminal() -> bool:
    return sys.stdout.isatty()


def width() -> int:
    """Columns of the terminal, 80 without one."""
    return shutil.get_terminal_size(fallback=(80, 24)).columns


def height() -> int:
    """Lines of the terminal, 24 without one."""
    return shutil.get_terminal_size(fallback=(80, 24)).lines


def coloured(text: str, colour: str) -> str:
    """`text`, coloured on a terminal whose user has not set NO_COLOR (no-color.org)."""
    if not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_CODES[colour]}m{text}\033[0m"


def print_lines(*lines: str, mark: str = "", colour: str = "") -> None:
    """Print for people, at once. Every line is `plain`, because it may hold text from a server or
    its peers; `mark` comes first, in `colour`."""
    for line in lines:
        print((coloured(mark, colour) if mark else "") + plain(line), flush=True)


def print_error(line: str) -> None:
    """Print an error to stderr, made `plain` as well, behind the name of the command."""
    print(plain(f"{_program}: {line}"), file=sys.stderr)


def clear_screen() -> None:
    """Before the next output of a watched command."""
    if is_terminal():
        sys.stdout.write("\033[H\033[J")


def duration(seconds: float) -> str:
    """3 min 20 s: for people."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def agreed(question: str) -> bool:
    """False without a terminal: a script passes --yes."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
