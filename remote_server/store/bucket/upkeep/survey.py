"""Survey of a bucket without a server: its packs, their sizes and ages, and whether they are
intact."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.grouping import MAX_ROWS
from remote_server.store.bucket.packs.object_names import (
    ROOT,
    escaped,
    parse_name,
    prefix_of,
    tenant_prefix,
    unescaped,
)
from remote_server.store.bucket.packs.pack import PackState, make_pack
from remote_server.store.bucket.transfers.pack_io import are_intact, read_start
from remote_server.store.bucket.upkeep.sweep import CLOCK, REMOVED_AT_ONCE
from remote_server.store.pages import PAGE

# Calls of the store at a time. Each holds a pack in memory.
AT_ONCE = 8

# The largest setting of `--pack` is 64 MiB: a larger object is not read.
MOST_BYTES = (64 << 20) + layout.MAX_HEADER_BYTES + PAGE * MAX_ROWS

# Chunks that fail one after the other before a removal ends.
MOST_FAILED = 3

Item = TypeVar("Item")
Result = TypeVar("Result")


class PackObject(NamedTuple):
    """A pack as a list shows it."""

    namespace: str
    key: bytes
    name: str
    num_bytes: int
    modified: float


def namespaces(objects: Objects, tenant: str) -> list[str]:
    """Those of `tenant` that have objects. Raises `BucketError`."""
    return sorted(_below(objects, tenant_prefix(tenant)))


def tenants(objects: Objects) -> list[str]:
    """Those that have objects; an empty name stands for a server without tenants. Raises
    `BucketError`."""
    return sorted(_below(objects, ROOT))


def _below(objects: Objects, prefix: str) -> Iterator[str]:
    for folder in objects.folders(prefix):
        part = folder.rstrip("/").rpartition("/")[2]
        with suppress(ValueError):
            if escaped(name := unescaped(part)) == part:
                yield name


def packs(objects: Objects, tenant: str, namespace: str | None = None) -> Iterator[PackObject]:
    """Those of one namespace, or of `tenant`. Other objects are left out. Raises `BucketError`."""
    for chunk in objects.listing(prefix_of(tenant, namespace)):
        for listed in chunk:
            if (named := parse_name(listed.name)) is not None:
                yield PackObject(named.namespace, named.key, *listed)


def clock(objects: Objects, tenant: str, newest: float) -> float:
    """The store's clock. Where nothing can be written it is `newest`, the date of the newest
    object."""
    try:
        return max(newest, objects.time(f"{tenant_prefix(tenant)}/{CLOCK}"))
    except BucketError:
        return newest


class Checked(NamedTuple):
    """The result of reading a pack, or its header."""

    rows: int = 0
    damage: str = ""
    """Why it is not the pack that its name promises; empty for an intact one."""
    failure: Failure | None = None
    words: str = ""
    """Why it could not be read, and the words of the store; without a `failure` it is a pack that
    only other servers can read."""


def check(objects: Objects, pack: PackObject) -> Checked:
    """Read `pack` and check its header and the checksum of every row."""
    if not 0 < pack.num_bytes <= MOST_BYTES:
        return Checked(damage=f"{pack.num_bytes} bytes, which no pack has")
    head = _head(objects, pack, pack.num_bytes)
    if isinstance(head, Checked):
        return head
    data, header = head
    rows = make_pack(header, pack.modified, PackState.READABLE, data).rows
    if data.nbytes < rows[-1].offset + rows[-1].stored:
        return Checked(damage=f"{data.nbytes} bytes, shorter than its rows")
    intact = are_intact(data, rows)
    if not all(intact):
        others = len(rows) - sum(intact) - 1
        return Checked(
            damage=f"the checksum of row {intact.index(False)} is wrong"
            + (f", and of {others} more" if others else "")
        )
    return Checked(len(rows))


def num_rows(objects: Objects, pack: PackObject) -> Checked:
    """The header alone: `check` without the rows."""
    head = _head(objects, pack, layout.HEADER_READ_BYTES)
    return head if isinstance(head, Checked) else Checked(len(head[1].rows))


def _head(
    objects: Objects, pack: PackObject, num_bytes: int
) -> tuple[memoryview, layout.PackHeader] | Checked:
    """The first `num_bytes` of `pack` or more, and its header; or why there is none."""
    try:
        head, header = read_start(objects, pack.name, pack.namespace, pack.key, num_bytes)
        return head.data, header
    except BucketError as error:
        return Checked(failure=error.failure, words=str(error))
    except layout.PackDamaged as error:
        return Checked(damage=str(error))
    except layout.PackForeign as error:
        return Checked(words=str(error))


class Removed(NamedTuple):
    """The end of a removal, or its state so far."""

    packs: int
    num_bytes: int
    left: int
    words: str = ""
    """Why some are left."""


def remove(objects: Objects, found: list[PackObject]) -> Iterator[Removed]:
    """Remove `found`; the state after each chunk. It ends early when the store keeps failing."""
    removed, num_bytes, words, failed = 0, 0, "", 0
    for start in range(0, len(found), REMOVED_AT_ONCE):
        chunk = found[start : start + REMOVED_AT_ONCE]
        try:
            objects.remove([each.name for each in chunk])
        except BucketError as error:
            words, failed = str(error), failed + 1
        else:
            removed += len(chunk)
            num_bytes += sum(each.num_bytes for each in chunk)
            failed = 0
        yield Removed(removed, num_bytes, len(found) - removed, words)
        if failed == MOST_FAILED:
            return


def at_once(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Each item with the result of `work`, in their order, `AT_ONCE` at a time. When the caller
    ends early no further item is begun."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                waiting.append((item, pool.submit(work, item)))
                if len(waiting) == 2 * AT_ONCE:
                    yield _next(waiting)
            while waiting:
                yield _next(waiting)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _next(waiting: "deque[tuple[Item, Future[Result]]]") -> tuple[Item, Result]:
    item, future = waiting.popleft()
    return item, future.result()
