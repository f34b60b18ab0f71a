"""Text from peers, made harmless for logs and terminals."""

import logging
import unicodedata
from typing import Any

# Control (C0 and C1), format (bidirectional marks, zero width), line and paragraph separators,
# halves of surrogate pairs.
_FORBIDDEN = ("Cc", "Cf", "Zl", "Zp", "Cs")

_INDENT = "    "


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


class PlainFormatter(logging.Formatter):
    """Log records of which only the first line begins in the first column: a message is one line,
    and the lines of a traceback are indented. So no text of a peer can imitate a record."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the name is logging's
        return plain(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        # Not by `splitlines`, which takes separators of Unicode for line breaks.
        lines = super().formatException(ei).split("\n")
        return "\n".join(_INDENT + plain(line) for line in lines)


def _escaped(character: str) -> str:
    if ord(character) < 0x80:
        return f"\\x{ord(character):02x}"
    return character.encode("ascii", "backslashreplace").decode()
