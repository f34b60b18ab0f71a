"""Reads of headers: what a lookup names and this server does not know yet."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from remote_server.store.bucket.index.names import KnownNames
from remote_server.store.bucket.objects.objects import Failure, Objects
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.transfers.pack_io import Largest, ReadHeader, read_header
from remote_server.store.chains import Group
from remote_server.store.io_threads import Job, Pool, Priority

# Headers of packs that are not known by name which one lookup has read: of the first it names.
MAX_HEADERS_PER_LOOKUP = 64

# Headers that are being read for all clients together.
MAX_HEADERS = 1024


class Pending:
    """Rows that are being written, and those of known packs whose headers are being read."""

    def __init__(self) -> None:
        self.rows: Counter[tuple[str, bytes]] = Counter()
        """How often each."""

    def add(self, namespace: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.rows[namespace, key] += 1

    def end(self, namespace: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.rows[namespace, key] -= 1
            if not self.rows[namespace, key]:
                del self.rows[namespace, key]


class HeaderReads:
    """The headers that are being read. One thread."""

    def __init__(
        self,
        objects: Objects,
        pool: Pool,
        tenant: str,
        names: KnownNames,
        pending: Pending,
        counters: Counter[str],
        on_read: Callable[[str, bytes, ReadHeader], None],
        largest: Largest,
    ) -> None:
        """Packs above the `largest` are not used. `on_read` gets the namespace, the key that names
        the pack, and the result."""
        self._objects = objects
        self._pool = pool
        self._tenant = tenant
        self._names = names
        self._pending = pending
        self._counters = counters
        self._on_read = on_read
        self._largest = largest
        self._reading: set[tuple[str, bytes]] = set()

    def read(self, namespace: str, groups: Iterable[Group]) -> None:
        """Read the headers of those packs of `groups` that are known to be there, and of the first
        `MAX_HEADERS_PER_LOOKUP` that may be."""
        num = 0
        for group in groups:
            name = namespace, group.name
            if name in self._reading or self._names.is_unreadable(*name):
                continue
            if self._names.has(namespace, group.name):
                self._begin(namespace, group, is_known=True)
            elif num < MAX_HEADERS_PER_LOOKUP and not self._names.is_absent(namespace, group.name):
                num += self._begin(namespace, group, is_known=False)

    def _begin(self, namespace: str, group: Group, *, is_known: bool) -> bool:
        if len(self._reading) >= MAX_HEADERS:
            self._counters["headers_declined"] += 1
            return False
        self._reading.add((namespace, group.name))
        rows = group.keys if is_known else []
        self._pending.add(namespace, rows)
        path = object_name(self._tenant, namespace, group.name)
        work = partial(read_header, self._objects, path, namespace, group.name, self._largest)
        finish = partial(self._ended, namespace, group.name, rows)
        self._pool.submit(Job(Priority.READ, lambda _: work(), finish))
        return True

    def _ended(
        self, namespace: str, key: bytes, rows: list[bytes], read: ReadHeader | None
    ) -> None:
        self._pending.end(namespace, rows)
        if (namespace, key) not in self._reading:
            return  # cleared or written meanwhile
        self._reading.remove((namespace, key))
        read = read or ReadHeader(None, failure=Failure.OTHER)
        self._counters["headers_read"] += read.header is not None
        self._counters["headers_damaged"] += bool(read.damage)
        if read.foreign:
            self._counters[read.foreign] += 1
        self._counters["headers_absent"] += read.failure is Failure.ABSENT
        self._on_read(namespace, key, read)

    def is_written(self, namespace: str, key: bytes) -> None:
        """The pack that `key` names was written: ignore the result of a read that began before."""
        self._reading.discard((namespace, key))

    def forget(self, namespace: str | None) -> None:
        """Ignore the results of those under way in one namespace, or in all."""
        self._reading = {each for each in self._reading if namespace not in (None, each[0])}
