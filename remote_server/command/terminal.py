"""What a terminal is given and a pipe is not: colours, and lines that replace each other."""

import os
import sys

_CODES = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


def is_terminal() -> bool:
    return sys.stdout.isatty()


def coloured(text: str, colour: str) -> str:
    """`text`, coloured on a terminal whose user has not set NO_COLOR (no-color.org)."""
    if not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_CODES[colour]}m{text}\033[0m"


def clear_screen() -> None:
    """Before the next picture of something that is watched."""
    if is_terminal():
        sys.stdout.write("\033[H\033[J")
