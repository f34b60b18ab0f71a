"""The row before each row of a prompt, learned from lookups and puts.

Chain fields hold the place of a row and not its prompt: many rows of a namespace have the same
place. Which rows form a pack is therefore known from messages alone, where neighbours are named
together. Each row keeps the number of the one before it, in memory and on disk.
"""

from collections.abc import Sequence
from itertools import repeat

from remote_server.protocol import KeyState, Stretch
from remote_server.store.chains import joined, row_id
from remote_server.store.memory.slabs import Block
from remote_server.turns import KEYS_PER_STEP, Steps

MAX_EXPECTED = 1 << 16
"""Rows that lookups named and no put has brought yet: these are kept, and up to as many more."""

_READABLE = bytes([KeyState.READABLE])


class Parents:
    """The rows before those that puts are expected to bring. One thread."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, bytes], bytes] = {}
        self._old: dict[tuple[str, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def looked_up(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], states: bytes
    ) -> Steps[None]:
        """A lookup of `keys` found `states`: puts of the others may come in any parts."""
        missing = len(states) - len(states.lstrip(_READABLE))
        if missing == len(keys):
            return
        begin = spent = 0
        for stretch in joined(chain):
            end = begin + stretch.rows
            if stretch.backwards:
                rows, before = keys[begin : end - 1], keys[begin + 1 : end]
            else:
                first = max(begin + 1, missing)
                rows, before = keys[first:end], keys[first - 1 : end - 1]
            for first in range(0, len(rows) if stretch.tokens else 0, KEYS_PER_STEP):
                part = slice(first, first + KEYS_PER_STEP)
                names = zip(repeat(namespace), rows[part], strict=False)
                self._new.update(zip(names, before[part], strict=False))
                spent += KEYS_PER_STEP // 4 + len(rows[part])
                if spent >= KEYS_PER_STEP:
                    yield
                    spent = 0
            begin = end
        if len(self._new) > MAX_EXPECTED:
            self._new, self._old = {}, self._new

    def reserved(self, namespace: str, blocks: Sequence[Block], chain: Sequence[Stretch]) -> None:
        """A put brings `blocks`, the first of those that `chain` describes."""
        begin = 0
        for stretch in joined(chain):
            end = min(begin + stretch.rows, len(blocks))
            step = 1 if stretch.backwards else -1
            for place in range(begin, end):
                name = namespace, blocks[place].key
                looked_up = self._new.pop(name, None) or self._old.pop(name, None)
                before = place + step
                if begin <= before < end:
                    blocks[place].set_parent(row_id(blocks[before].key))
                elif looked_up is not None:
                    blocks[place].set_parent(row_id(looked_up))
            begin += stretch.rows
