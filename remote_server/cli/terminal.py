"""What the commands print, and what of it only a terminal is given: colours, and lines that replace
each other."""

import os
import sys

from remote_server.plain_text import plain

_CODES = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


def is_terminal() -> bool:
    return sys.stdout.isatty()


def coloured(text: str, colour: str) -> str:
    """`text`, coloured on a terminal whose user has not set NO_COLOR (no-color.org)."""
    if not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_CODES[colour]}m{text}\033[0m"


def say(*lines: str, mark: str = "", colour: str = "") -> None:
    """Print for people, at once. Every line is `plain`, because it may hold what a server or its
    peers sent; `mark` comes first, in `colour`."""
    for line in lines:
        print((coloured(mark, colour) if mark else "") + plain(line), flush=True)


def complain(line: str) -> None:
    """Print to stderr what went wrong, on the same terms."""
    print(plain(f"kvferry: {line}"), file=sys.stderr)


def clear_screen() -> None:
    """Before the next picture of something that is watched."""
    if is_terminal():
        sys.stdout.write("\033[H\033[J")
