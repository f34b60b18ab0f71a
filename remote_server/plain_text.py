"""Text from peers, made harmless for logs and terminals.

Standard library only: `kvferry doctor` imports it in a Python without other packages.
"""

import logging
import re
import unicodedata
from collections.abc import Callable
from typing import Any

# Control (C0 and C1), format (bidirectional marks, zero width), line and paragraph separators,
# halves of surrogate pairs.
_FORBIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs")

_INDENT = "    "

EVERY_S = 10.0
LINES = 8


def forbidden_in(text: str) -> str:
    """The first character of `text` that no name may have, as `U+001B`; empty without any."""
    if text.isprintable():
        return ""
    for character in text:
        if unicodedata.category(character) in _FORBIDDEN:
            return f"U+{ord(character):04X}"
    return ""


def plain(text: str) -> str:
    """`text` in one line that a terminal shows and does not obey: forbidden characters become
    escapes, such as `\\x1b` or `\\u202e`. Other text is unchanged."""
    if text.isprintable():
        return text
    return "".join(
        _escaped(one) if unicodedata.category(one) in _FORBIDDEN else one for one in text
    )


_SECRETS = re.compile(
    r"(?<=://)[^/@\s]+(?=@)"  # the user and the password of an address
    r"|(?<=\?)[^\s#]+"  # its query: a signature, a key
)


def without_secrets(text: str) -> str:
    """`text` with `***` in place of the user, the password and the query of every address in
    it."""
    return _SECRETS.sub("***", text)


class PlainFormatter(logging.Formatter):
    """Log records of which only the first line begins in the first column: a message is one line,
    and the lines of a traceback are indented. So no text of a peer can imitate a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is logging's
        return plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        # Not by `splitlines`, which takes separators of Unicode for line breaks.
        lines = super().formatException(ei).split("\n")
        return "\n".join(_INDENT + plain(line) for line in lines)


class FewLines:
    """At most `LINES` log lines in `EVERY_S` seconds, of those that a peer can cause."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._again_at = clock()
        self._left = LINES
        self._left_out = 0

    def say(self, level: int, message: str, *about: object) -> None:
        """Log it, unless the limit is reached; the next line has the number of lines left out."""
        now = self._clock()
        if now >= self._again_at:
            self._again_at, self._left = now + EVERY_S, LINES
        if not self._left:
            self._left_out += 1
            return
        self._left -= 1
        more = f" (and {self._left_out:,} lines like it before)" if self._left_out else ""
        self._left_out = 0
        self._log.log(level, message + more, *about)


def _escaped(character: str) -> str:
    if ord(character) < 0x80:
        return f"\\x{ord(character):02x}"
    return character.encode("ascii", "backslashreplace").decode()
