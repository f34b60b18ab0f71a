"""Packs some of whose rows are still to be put."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from remote_server.protocol import KeyState
from remote_server.store.chains import Group

# Rows of packs that are awaited from puts.
MAX_AWAITED_ROWS = 1 << 16


class Wanted(NamedTuple):
    """A pack that is to be written; `keys` are its rows in the order of their tokens."""

    namespace: str
    block_bytes: int
    keys: list[bytes]


class _Awaited(NamedTuple):
    wanted: Wanted
    left: set[bytes]


class AwaitedRows:
    """The rows that puts are to make readable, each with its pack. One thread."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, bytes], _Awaited] = {}
        self._in_order: deque[_Awaited] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add_rest(
        self, namespace: str, block_bytes: int, groups: Sequence[Group], states: bytes
    ) -> None:
        """Await those rows of `groups` that are not readable by the `states` of their lookup."""
        for group in groups:
            left = {
                key for key, place in zip(group.keys, group.places, strict=True)
                if states[place] != KeyState.READABLE
            }  # fmt: skip
            if left:
                self._add(_Awaited(Wanted(namespace, block_bytes, group.keys), left))

    def _add(self, awaited: _Awaited) -> None:
        namespace = awaited.wanted.namespace
        self._rows.update({(namespace, key): awaited for key in awaited.left})
        self._in_order.append(awaited)
        while max(len(self._rows), len(self._in_order)) > MAX_AWAITED_ROWS:
            oldest = self._in_order.popleft()
            for key in oldest.left:
                name = oldest.wanted.namespace, key
                if self._rows.get(name) is oldest:
                    del self._rows[name]

    def came(self, namespace: str, key: bytes) -> Wanted | None:
        """The row of `key` is readable. Returns its pack if it was the last one missing."""
        awaited = self._rows.pop((namespace, key), None)
        if awaited is None:
            return None
        awaited.left.discard(key)
        return None if awaited.left else awaited.wanted

    def forget(self, namespace: str | None) -> None:
        """Await no rows of one namespace any more, or of all."""
        self._rows = {
            each: awaited for each, awaited in self._rows.items()
            if namespace not in (None, each[0])
        }  # fmt: skip
