"""The contents of the bucket, as far as this server knows them, and their ages."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from remote_server.protocol import KeyState
from remote_server.store.bucket.index.index import BucketIndex
from remote_server.store.bucket.index.names import KnownNames
from remote_server.store.bucket.index.store_clock import StoreClock
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.pack import Pack, PackState


class Pending:
    """Rows that are being written, and those of known packs whose headers are being read."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, bytes]] = Counter()
        """How often each."""
        self.headers: set[tuple[str, bytes]] = set()
        """Packs whose headers are being read. The result for any other is ignored."""

    def add(self, namespace: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.rows[namespace, key] += 1

    def end(self, namespace: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.rows[namespace, key] -= 1
            if not self.rows[namespace, key]:
                del self.rows[namespace, key]


class Swept(NamedTuple):
    """The end of one sweep."""

    removed: list[tuple[str, bytes]]
    """Namespace and key of each pack that was removed."""
    partitions: range = range(0)
    names: Mapping[str, Sequence[int]] = MappingProxyType({})
    """By namespace, the sorted `pack_id` of the packs that stay in the partitions."""
    num_bytes: int = 0
    failure: Failure | None = None
    now: float = 0.0
    """The store's clock."""


class Contents:
    """The index of packs whose headers are known, the names of all others, and what is on its way
    between the two. One thread."""

    def __init__(self, clock: Callable[[], float], counters: Counter[str]) -> None:
        """`clock` is monotonic."""
        self.index = BucketIndex()
        self.names = KnownNames(clock)
        self.pending = Pending()
        self.clock = StoreClock(clock)
        self._counters = counters

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether the pack that `key` names is in the bucket or being written, as far as is known,
        or another pack with that row."""
        return (
            self.index.row(namespace, key) is not None
            or (namespace, key) in self.pending.rows
            or self.names.has(namespace, key)
        )

    def states(self, namespace: str, keys: Sequence[bytes], *, are_readable: bool) -> bytes:
        """READABLE, unless no row may be: its pack's header is known. PENDING: the pack is being
        written, or is known and its header is being read."""
        rows = self.index.rows(namespace) if are_readable else {}
        if not rows and not self.pending.rows:
            return bytes(len(keys))
        return bytes(
            KeyState.READABLE if key in rows
            else KeyState.PENDING if (namespace, key) in self.pending.rows
            else KeyState.ABSENT
            for key in keys
        )  # fmt: skip

    def listed(self, names: Mapping[str, Sequence[int]], now: float) -> None:
        """The packs that a list of the bucket has shown: by namespace, their sorted `pack_id`.
        `now` is the store's clock, or a date before that."""
        self.clock.saw(now)
        self._counters["listed"] += 1
        self.names.add_all(names)

    def is_written(self, pack: Pack) -> None:
        """`pack` is in the bucket. A read of its header that began before shows what was there."""
        self.names.is_there(pack.namespace, pack.key)
        self.pending.headers.discard((pack.namespace, pack.key))

    def swept(self, swept: Swept) -> None:
        """Forget what a sweep has removed, and the names of packs that other servers have removed
        from its partitions."""
        self.clock.set(swept.now)
        self._counters["sweeps"] += 1
        self._counters["swept_packs"] += len(swept.removed)
        for namespace, key in swept.removed:
            pack = self.index.pack(namespace, key)
            if pack is not None:
                self._counters["evicted"] += len(pack.rows)
                self.index.drop(pack)
            self.names.is_gone(namespace, key)
        if swept.partitions:
            self.names.replace(swept.partitions, swept.names)

    def drop(self, pack: Pack) -> None:
        """Forget `pack` and its name."""
        if pack.state is PackState.READABLE:
            self.index.drop(pack)
        self.names.is_gone(pack.namespace, pack.key)

    def expire(self, namespace: str, keys: Sequence[bytes], max_age_s: float) -> None:
        """`Tier.expire`."""
        rows = self.index.rows(namespace)
        self._expire({rows[key].pack for key in keys if key in rows}, max_age_s)

    def expire_some(self, max_age_s: float, at_most: int) -> None:
        """`Tier.expire_some`."""
        self._expire(self.index.next_packs(at_most), max_age_s)

    def _expire(self, packs: Iterable[Pack], max_age_s: float) -> None:
        """Forget what is too old. The objects are removed by sweeps, which ask the store for its
        time: until the next one, a jump of this machine's clock makes packs look old."""
        for pack in packs:
            if self.clock.age_s(pack.modified) >= max_age_s:
                self._counters["expired"] += len(pack.rows)
                self.drop(pack)

    def clear(self, namespace: str | None) -> int:
        """Forget the packs of one namespace, or all. Returns their rows."""
        packs = self.index.packs(namespace)
        num_rows = sum(len(pack.rows) for pack in packs)
        for pack in packs:
            self.index.drop(pack)
        self.names.clear(namespace)
        self.pending.headers = {
            each for each in self.pending.headers if namespace not in (None, each[0])
        }
        self._counters["cleared"] += num_rows
        return num_rows
