"""A put of many keys, whose slots are reserved a part at a time."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from remote_server.errors import RequestRefused
from remote_server.protocol import Declined, ErrorCode
from remote_server.steps import KEYS_PER_STEP, parts
from remote_server.store.answers import Reserved
from remote_server.store.store import Store


class PartedPut:
    """What the store has reserved for each part, in the order of the keys.

    Every part is ended once, by its owner. The keys of a part that is reserved are pending, while
    those of the next one are not known yet.
    """

    def __init__(
        self,
        store: Store,
        namespace: str,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        *,
        force: bool,
        draining: bool,
    ) -> None:
        """The namespace must be declared, and all `lengths` fit into its blocks."""
        self._store = store
        self._declared = store.namespaces[namespace].block_bytes
        self._namespace = namespace
        self._given = keys, lengths, checksums
        self._force = force
        self._draining = draining
        self.parts: list[Reserved] = []
        self.bytes_of_part: list[int] = []
        """As announced, what is not written included."""
        self.num_blocks = 0
        self.num_keys = 0
        """Of the parts that are reserved."""

    def reserve(self) -> Iterable[tuple[Reserved, int]]:
        """Each part, and of how many keys it is, when it has been reserved. Raises `RequestRefused`
        when the namespace was forgotten since: its blocks may have another size now."""
        keys, lengths, checksums = self._given
        if len(keys) <= KEYS_PER_STEP:  # at once: a generator costs as much as all the rest
            return (self._reserve(keys, lengths, checksums, None),)
        return self._reserve_parts(set())

    def _reserve_parts(self, seen: set[bytes]) -> Iterator[tuple[Reserved, int]]:
        keys, lengths, checksums = self._given
        each = zip(parts(keys), parts(lengths), parts(checksums), strict=True)
        for of_keys, of_lengths, of_checksums in each:
            if self.parts:
                self._check_still_declared()
            yield self._reserve(of_keys, of_lengths, of_checksums, seen)

    def _reserve(
        self,
        keys: Sequence[bytes],
        lengths: Sequence[int],
        checksums: Sequence[int | None],
        seen: set[bytes] | None,
    ) -> tuple[Reserved, int]:
        reserved = self._store.begin_put(
            self._namespace, keys, lengths, checksums,
            force=self._force, draining=self._draining, seen=seen,
        )  # fmt: skip
        self.parts.append(reserved)
        self.bytes_of_part.append(sum(lengths))
        self.num_blocks += len(reserved.blocks)
        self.num_keys += len(keys)
        return reserved, len(keys)

    def _check_still_declared(self) -> None:
        info = self._store.namespaces.get(self._namespace)
        if info is None or info.block_bytes != self._declared:
            raise RequestRefused(
                ErrorCode.UNKNOWN_NAMESPACE,
                f"namespace {self._namespace!r} was forgotten while the put was read: say hello",
            )

    def give_up(self) -> None:
        """Nothing of it is kept."""
        for part in self.parts:
            self._store.end_put(part, None, Declined.WITHDRAWN)

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of_part)

    def as_one(self) -> Reserved:
        """What has become of all keys by now, without the blocks."""
        if len(self.parts) == 1:
            return self.parts[0]
        reasons: Counter[str] = Counter()
        for part in self.parts:
            reasons.update(part.reasons)
        return Reserved(bytearray().join(part.outcomes for part in self.parts), [], [], reasons)
