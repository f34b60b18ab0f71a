"""The kinds of requests that a client makes."""

from enum import StrEnum, auto


class Op(StrEnum):
    """Every request is of one of these kinds, whatever messages it takes on the wire."""

    HELLO = auto()
    LOOKUP = auto()
    TOUCH = auto()
    STATS = auto()
    CLEAR = auto()
    KEEP = auto()
    VERIFY = auto()
    PUT = auto()
    GET = auto()

    @property
    def timeouts(self) -> str:
        """Name of the counter of those that were not answered in time."""
        return f"timeouts_{self}"
