"""The keys that a get names before it requests them, for a server that reads far ahead."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from remote_server.protocol import MAX_AHEAD_KEYS


class Ahead(NamedTuple):
    """What one request names ahead of it, and the sizes of these blocks."""

    keys: list[bytes]
    sizes: list[int]


class NamedAhead:
    """The blocks of one get that the server knows of and that were not requested yet: always the
    next ones. Each is named once."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()

    def next(self, number: int, blocks: Iterator[tuple[bytes, int]], most_bytes: int) -> Ahead:
        """What a request of the next `number` blocks can name, so that the server knows of
        `most_bytes` behind them. `blocks` are the keys and sizes of all that remain."""
        room = most_bytes - sum(islice(self._sizes, number, None))
        ahead = Ahead([], [])
        for key, size in islice(blocks, max(number, len(self._sizes)), None):
            room -= size
            if room < 0 or len(ahead.keys) == MAX_AHEAD_KEYS:
                break
            ahead.keys.append(key)
            ahead.sizes.append(size)
        return ahead

    def sent(self, number: int, ahead: Ahead) -> None:
        """The request of the next `number` blocks was sent, and named `ahead`."""
        for _ in range(min(number, len(self._sizes))):
            self._sizes.popleft()
        self._sizes += ahead.sizes
