"""Blocks whose place in a prompt is not known: each goes by its own use, the oldest first."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

BYTES = 90
"""Memory of one, about."""


class Alone:
    """They are compared by identity. Each call takes the same time, amortised."""

    def __init__(self) -> None:
        self._used_at: OrderedDict[Any, float] = OrderedDict()  # the oldest first
        self._aside: dict[Any, float] = {}  # a pin keeps these

    def __len__(self) -> int:
        return len(self._used_at) + len(self._aside)

    def __iter__(self) -> Iterator[Any]:
        yield from self._used_at
        yield from self._aside

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return BYTES * len(self)

    def add(self, block: Any, now: float) -> None:
        """`block`, which is not here, is the most recently used one."""
        self._used_at[block] = now

    def use(self, block: Any, now: float) -> None:
        """`block` is the most recently used one; if it is aside it stays there."""
        if block in self._aside:
            self._aside[block] = now
        else:
            self._used_at[block] = now
            self._used_at.move_to_end(block)

    def refresh(self, block: Any) -> None:
        """`block` was published, or its last pin released: it goes after all others."""
        used_at = self._aside.pop(block, None)
        if used_at is None:
            self._used_at.move_to_end(block)
        else:
            self._used_at[block] = used_at

    def unpin(self, block: Any) -> None:
        """The last pin of `block` was released."""
        if block in self._aside:
            self.refresh(block)

    def remove(self, block: Any) -> float:
        """Take `block` out. Returns when it was used last."""
        used_at = self._used_at.pop(block, None)
        return self._aside.pop(block) if used_at is None else used_at

    def oldest(self) -> tuple[Any, float] | None:
        """The least recently used one that is not pinned, and when that was. Pinned ones that are
        older are passed over no more."""
        used_at = self._used_at
        while used_at:
            block = next(iter(used_at))
            if not block.pins:
                return block, used_at[block]
            self._aside[block] = used_at.pop(block)
        return None
