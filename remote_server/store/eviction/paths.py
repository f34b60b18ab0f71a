"""Prompts in order: which key is before each that a put will bring, and which turn it is."""

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

FEW = 64
"""Of so many hashes plain Python finds the wanted ones sooner than numpy; more are an array."""

MAX_EXPECTED = 1 << 16
"""Keys that requests named: so many are kept, and up to as many more."""

EXPECTED_BYTES = 80
"""Memory of one of these, about. A key that a later request brings too is the same object."""

TABLE = 1 << 17
"""Ends of prompts that are remembered, resident or not, 8 bytes each. A newer one takes the place
of an older one by chance."""

SHARED = 2
"""An end that more prompts than these continue is a common beginning, not a conversation."""

_MOST = 15

_PLACE = TABLE - 1
"""The bits of a hash that are its place in the table."""


class Path:
    """The keys of one request's prompt, in its order, from any block on.

    `kinds` are the classes of its blocks, by the number of uses before. `number` is unique, and
    not 0. The request found the first `num_held` of its keys. It is `served` once a get or a put
    of it came.
    """

    __slots__ = ("at", "keys", "kinds", "num_held", "number", "refused", "served", "upcoming")

    def __init__(
        self, number: int, keys: Sequence[bytes], kinds: Sequence[int], at: float, num_held: int
    ) -> None:
        self.number = number
        self.keys = keys
        self.kinds = kinds
        self.at = at
        self.num_held = num_held
        self.served = False
        self.upcoming = 0  # the next key that a put will bring, if they come in order
        self.refused = len(keys)  # the first key that was refused as unlikely

    def place(self, key: bytes) -> int:
        """The index of `key`, which is one of its keys."""
        upcoming = self.upcoming
        if upcoming < len(self.keys) and self.keys[upcoming] == key:
            return upcoming
        return self.keys.index(key)


class Paths:
    """The last path of each key that gets and puts are expected to name."""

    def __init__(self) -> None:
        self._new: dict[str, dict[bytes, Path]] = {}
        self._old: dict[str, dict[bytes, Path]] = {}
        self._num_new = 0

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about: a row of the table, and the key with its place in a path."""
        rows = sum(len(keys) for both in (self._new, self._old) for keys in both.values())
        return EXPECTED_BYTES * rows

    def add(self, namespace: str, path: Path, keys: Sequence[bytes]) -> None:
        """Gets and puts of `keys`, which are some of `path`, follow."""
        self._new.setdefault(namespace, {}).update(dict.fromkeys(keys, path))
        self._num_new += len(keys)
        if self._num_new > MAX_EXPECTED:
            self._new, self._old, self._num_new = {}, self._new, 0

    def knows(self, namespace: str) -> bool:
        """Whether `of` may find a path in this namespace."""
        return namespace in self._new or namespace in self._old

    def of(self, namespace: str, key: bytes) -> Path | None:
        """The path of `key`, by the last request that named it."""
        for generation in (self._new, self._old):
            paths = generation.get(namespace)
            if paths is not None and (path := paths.get(key)) is not None:
                return path
        return None


class Turns:
    """The turn of each prompt in its conversation: one more than that of the prompt it continues.

    A prompt that is sent again as it was counts as a turn too. A bounded table of ends, so that a
    conversation whose blocks were evicted goes on.
    """

    def __init__(self) -> None:
        self.continued = 0
        """The hash of the end that the last prompt continues; 0: it begins a conversation."""
        self._table = array("Q", bytes(8 * TABLE))  # 52 bits of a hash, turn, branches, uses
        self._entries = np.frombuffer(self._table, np.uint64)  # the same memory

    def turn_of(self, hashes: Sequence[int] | Hashes) -> int:
        """The turn of the prompt whose keys have these hashes of 64 bits, from 0; recorded."""
        table = self._table
        end = len(hashes) - 1
        index = self._last_end(hashes)
        turn = self.continued = 0
        if index >= 0:
            one = int(hashes[index])
            entry = table[one & _PLACE]
            turn, branches, uses = entry >> 8 & 0xF, entry >> 4 & 0xF, entry & 0xF
            if index == end:
                table[one & _PLACE] = _entry(one, turn, branches, uses + 1)
                self.continued = one
                return max(turn, uses)
            table[one & _PLACE] = _entry(one, turn, branches + 1, uses)
            if branches < SHARED:
                turn, self.continued = turn + 1, one
            else:
                turn = 0
        if end >= 0:
            one = int(hashes[end])
            table[one & _PLACE] = _entry(one, turn, 0, 1)
        return turn

    def _last_end(self, hashes: Sequence[int] | Hashes) -> int:
        """The index of the last one that is the end of an earlier prompt; -1: none is."""
        if isinstance(hashes, np.ndarray):
            entries = self._entries[hashes & np.uint64(_PLACE)]
            is_end = (entries ^ hashes < 1 << 12) & (entries & np.uint64(0xF) > 0)
            (found,) = is_end.nonzero()
            return int(found[-1]) if len(found) else -1
        table = self._table
        for index in range(len(hashes) - 1, -1, -1):
            one = hashes[index]
            entry = table[one & _PLACE]
            if entry ^ one < 1 << 12 and entry & 0xF:  # their bits from the twelfth on are equal
                return index
        return -1


def _entry(one: int, turn: int, branches: int, uses: int) -> int:
    kept = min(turn, _MOST) << 8 | min(branches, _MOST) << 4 | min(uses, _MOST)
    return one >> 12 << 12 | kept
