"""The index of a device's rows by block, with LRU eviction."""

from collections import OrderedDict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile


class RowTable:
    """Rows by key. The least recently used is evicted first; within a prompt, the last block."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.evicted = 0
        self._free: list[int] = [*range(num_rows)]
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    @property
    def num_used(self) -> int:
        """Rows that are not free."""
        return self.num_rows - len(self._free)

    def prefix(self, keys: Sequence[bytes]) -> list[int]:
        """The rows of `keys` up to the first without one."""
        return [self._rows[key] for key in takewhile(self._rows.__contains__, keys)]

    def take(self, key: bytes, own: AbstractSet[bytes]) -> int | None:
        """A row for `key`, which has none; if none is free, that of the oldest block. None when
        that is one of `own`: those were touched last, so there are no others."""
        if self._free:
            row = self._free.pop()
        else:
            oldest = next(iter(self._rows))
            if oldest in own:
                return None
            row = self._rows.pop(oldest)
            self.evicted += 1
        self._rows[key] = row
        return row

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record a use of `keys` as the blocks of one prompt: blocks behind a gap are of no use,
        so the last one is evicted first."""
        for key in reversed(keys):
            if key in self._rows:
                self._rows.move_to_end(key)

    def remove(self, key: bytes) -> None:
        self._free.append(self._rows.pop(key))
