"""Reads of headers: what a lookup names and this server does not know yet."""

from collections.abc import Callable, Iterable
from functools import partial

from remote_server.store.bucket.index.contents import Contents
from remote_server.store.bucket.objects.context import BucketContext
from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.object_names import object_name
from remote_server.store.bucket.transfers.pack_io import Largest, ReadHeader, read_header
from remote_server.store.chains import Group
from remote_server.store.io_threads import Priority

# Headers of packs that are not known by name which one lookup has read: of the first it names.
MAX_HEADERS_PER_LOOKUP = 64

# Headers that are being read for all clients together.
MAX_HEADERS = 1024


class HeaderReads:
    """The headers that are being read. One thread."""

    def __init__(
        self,
        context: BucketContext,
        contents: Contents,
        largest: Largest,
        on_read: Callable[[str, bytes, ReadHeader], None],
    ) -> None:
        """Packs above the `largest` are not used. `on_read` gets the namespace, the key that names
        the pack, and the result."""
        self._context = context
        self._names = contents.names
        self._pending = contents.pending
        self._counters = context.counters
        self._largest = largest
        self._on_read = on_read

    def read(self, namespace: str, groups: Iterable[Group]) -> None:
        """Read the headers of those packs of `groups` that are known to be there, and of the first
        `MAX_HEADERS_PER_LOOKUP` that may be."""
        num, reading = 0, self._pending.headers
        for group in groups:
            name = namespace, group.name
            if name in reading or self._names.is_unreadable(*name):
                continue
            if self._names.has(namespace, group.name):
                self._begin(namespace, group, is_known=True)
            elif num < MAX_HEADERS_PER_LOOKUP and not self._names.is_absent(namespace, group.name):
                num += self._begin(namespace, group, is_known=False)

    def _begin(self, namespace: str, group: Group, *, is_known: bool) -> bool:
        if len(self._pending.headers) >= MAX_HEADERS:
            self._counters["headers_declined"] += 1
            return False
        self._pending.headers.add((namespace, group.name))
        rows = group.keys if is_known else []
        self._pending.add(namespace, rows)
        path = object_name(self._context.tenant, namespace, group.name)
        objects = self._context.objects
        work = partial(read_header, objects, path, namespace, group.name, self._largest)
        finish = partial(self._ended, namespace, group.name, rows)
        self._context.call(Priority.READ, work, finish)
        return True

    def _ended(
        self, namespace: str, key: bytes, rows: list[bytes], read: ReadHeader | None
    ) -> None:
        self._pending.end(namespace, rows)
        if (namespace, key) not in self._pending.headers:
            return  # cleared or written meanwhile
        self._pending.headers.remove((namespace, key))
        read = read or ReadHeader(None, failure=Failure.OTHER)
        self._counters["headers_read"] += read.header is not None
        self._counters["headers_damaged"] += bool(read.damage)
        if read.foreign:
            self._counters[read.foreign] += 1
        self._counters["headers_absent"] += read.failure is Failure.ABSENT
        self._on_read(namespace, key, read)
