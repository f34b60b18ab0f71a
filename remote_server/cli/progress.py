"""Progress of a command that may take long, on stderr: results on stdout stay readable."""

import sys
import time
from typing import Self

from remote_server.plain_text import plain

# On a terminal the line is replaced; a log gets a new one.
EVERY_S = 0.2
EVERY_S_IN_A_LOG = 10.0


class Progress:
    """One line, which `show` replaces. `with` removes it at the end, also after Ctrl-C."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._quiet = quiet
        self._next = time.monotonic() + (0 if self._is_terminal else EVERY_S_IN_A_LOG)

    def show(self, line: str) -> None:
        """Print `line`, unless the one before is too young."""
        now = time.monotonic()
        if self._quiet or now < self._next:
            return
        if self._is_terminal:
            self._next = now + EVERY_S
            sys.stderr.write(f"\r\033[K{plain(line)}")
            sys.stderr.flush()
        else:
            self._next = now + EVERY_S_IN_A_LOG
            sys.stderr.write(f"{plain(line)}\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal and not self._quiet:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
