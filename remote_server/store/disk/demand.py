"""How much room each namespace wanted: what it takes to get a segment that others use."""

from collections.abc import Sequence
from itertools import islice

# Keys are remembered as hashes, 100 bytes each. A segment with more slots than `MAX_OF_ONE` is
# granted for that many.
MAX_OF_ONE = 1 << 16
MAX_REMEMBERED = 1 << 17

Place = tuple[str, int]
"""A namespace and its block size."""


class Demand:
    """Distinct keys that were to be stored, by namespace, since its last segments were granted.

    Distinct, because one block that is offered a hundred times needs one slot. Beyond
    `MAX_REMEMBERED` the namespace that has wanted nothing for longest is forgotten.
    """

    def __init__(self) -> None:
        self._wanted: dict[Place, dict[int, None]] = {}  # who wanted something last is last
        self._num_remembered = 0

    def add(self, place: Place, keys: Sequence[bytes]) -> None:
        wanted = self._wanted.pop(place, {})
        self._wanted[place] = wanted
        before = len(wanted)
        wanted.update(dict.fromkeys(map(hash, islice(keys, max(0, MAX_OF_ONE - before)))))
        self._num_remembered += len(wanted) - before
        while self._num_remembered > MAX_REMEMBERED:
            self._drop(next(iter(self._wanted)))

    def is_enough(self, place: Place, num_slots: int) -> bool:
        """Whether so many slots would be used."""
        return len(self._wanted.get(place, ())) >= min(num_slots, MAX_OF_ONE)

    def granted(self, place: Place, num_slots: int) -> None:
        """A segment of `num_slots` serves the first of them."""
        wanted = self._wanted.get(place, {})
        for key in [*islice(wanted, num_slots)]:
            del wanted[key]
            self._num_remembered -= 1
        if not wanted:
            self._wanted.pop(place, None)

    def forget(self, namespace: str | None) -> None:
        """Of one namespace, or of all: it was cleared."""
        for place in [place for place in self._wanted if namespace in (None, place[0])]:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        self._num_remembered -= len(self._wanted.pop(place))
