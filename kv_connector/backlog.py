"""Which blocks of the CPU pool the server has, and which it still lacks.

A server that was away, or lost its memory with a restart, lacks blocks that the pool may hold for
a long time yet. These are only keys, no rows: whether a key's row is still in the pool is asked
when its turn comes. No clock, no socket; the scheduler thread alone calls it.
"""

from collections.abc import Iterable, Mapping
from itertools import islice

# About 150 bytes each, so 20 MB for both lists at most; at 1 MiB a block this covers a pool of
# 64 GiB. What is beyond it costs a computation after an outage, nothing else.
MOST_KEYS = 65_536

# A key whose put fails this often is not offered again: the server answers, but not to this.
MOST_ATTEMPTS = 3


class Backlog:
    """Keys the server was given, and keys it is to be offered, both in the order they came.

    Both lists hold at most `most_keys`. A full one drops its oldest keys first, whose rows are
    the most likely to have left the pool. Methods that drop keys to be offered say how many.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = max(1, min(most_keys, MOST_KEYS))
        self._held: dict[bytes, None] = {}
        self._due: dict[bytes, int] = {}

    def __len__(self) -> int:
        """How many keys are to be offered, without those that were taken."""
        return len(self._due)

    def held(self, keys: Iterable[bytes]) -> None:
        """The server has these now."""
        for key in keys:
            self._due.pop(key, None)
            self._held.pop(key, None)
            self._held[key] = None
        _drop_oldest(self._held, self._most_keys)

    def missing(self, keys: Iterable[bytes]) -> int:
        """The server has not got these and is to be offered them. Gives how many were dropped."""
        for key in keys:
            self._held.pop(key, None)
            self._due.setdefault(key, 0)
        return _drop_oldest(self._due, self._most_keys)

    def lost(self) -> int:
        """The server has lost all it was given: another one runs there now."""
        held, self._held = self._held, {}
        self._due = {**dict.fromkeys(held, 0), **self._due}
        return _drop_oldest(self._due, self._most_keys)

    def take(self, most: int) -> dict[bytes, int]:
        """The next keys to offer, oldest first, each with how often that has failed before. They
        are out of the list; `held` or `failed` says what became of them."""
        taken = dict(islice(self._due.items(), most))
        for key in taken:
            del self._due[key]
        return taken

    def failed(self, taken: Mapping[bytes, int]) -> int:
        """Taken keys that could not be put: offered again, but not for ever. Gives how many were
        dropped for that."""
        again = {key: n + 1 for key, n in taken.items() if n + 1 < MOST_ATTEMPTS}
        self._due |= again
        return len(taken) - len(again)

    def clear(self) -> int:
        """Forget everything: neither list is about this pool or namespace any more."""
        dropped = len(self._due)
        self._held.clear()
        self._due.clear()
        return dropped


def _drop_oldest(keys: dict[bytes, None] | dict[bytes, int], most: int) -> int:
    excess = max(0, len(keys) - most)
    for key in list(islice(keys, excess)):
        del keys[key]
    return excess
