"""Calls of the object store, measured from outside: the bucket's threads time them, the loop counts
them."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import TracebackType

from remote_server.histograms import Histogram, Timings, together
from remote_server.protocol import BucketCalls, BucketStats
from remote_server.store.bucket.down.writer import PackWriter
from remote_server.store.bucket.objects.objects import (
    Body,
    BucketError,
    Failure,
    Head,
    Listed,
    Objects,
)

KINDS = ("put", "get", "header", "head", "list", "delete")
"""`get` reads rows, `header` the beginning of an object, `head` its size."""


class Call:
    """One call, on the thread that makes it: `with` takes its time and its result."""

    def __init__(self, meter: "CallMeter", kind: str) -> None:
        self.kind = kind
        self.result = "ok"
        self.num_bytes = 0
        self.seconds = 0.0
        self.words = ""
        """Those of the store, of a call that failed."""
        self.is_request = True
        self._meter = meter

    def __enter__(self) -> "Call":
        self._began = self._meter.clock()
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> None:
        self.seconds = self._meter.clock() - self._began
        if isinstance(error, BucketError):
            self.result = str(error.failure)
            self.words = "" if error.failure is Failure.ABSENT else str(error)
        elif error is not None:
            self.result, self.words = str(Failure.OTHER), repr(error)
        if self.is_request:
            self._meter.ended.append(self)


class CallMeter:
    """The calls of one tenant, by kind."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self.clock = clock
        self.ended: deque[Call] = deque()
        """Calls that threads have made and the loop has not counted."""
        self._results = {kind: Counter[str]() for kind in KINDS}
        self._bytes = dict.fromkeys(KINDS, 0)
        self._times = {kind: Histogram() for kind in KINDS}
        self._last_failure = ""
        self._failed_at = 0.0

    def count(self) -> None:
        """Count the calls that have ended. To be called in every turn with finished jobs."""
        for _ in range(len(self.ended)):
            call = self.ended.popleft()
            self._results[call.kind][call.result] += 1
            self._bytes[call.kind] += call.num_bytes
            self._times[call.kind].observe(call.seconds)
            if call.words:
                self._last_failure = f"{call.kind}: {call.result}: {call.words}"
                self._failed_at = self.clock()

    def stats(self, writer: PackWriter) -> BucketStats:
        """The bucket of `writer` now."""
        self.count()
        tier = writer.tier
        return BucketStats(
            paused_s=tier.availability.paused_s,
            last_failure=self._last_failure,
            last_failure_s=self.clock() - self._failed_at if self._last_failure else 0.0,
            names=tier.num_names,
            packs_waiting=writer.num_packs_waiting,
            writable_bytes=writer.budget.left(),
            calls={
                kind: BucketCalls(
                    results=dict(self._results[kind]),
                    num_bytes=self._bytes[kind],
                    times=self._times[kind].timings(),
                )
                for kind in KINDS
            },
        )


class MeteredObjects(Objects):
    """`Objects` whose calls `meter` gets."""

    def __init__(self, objects: Objects, meter: CallMeter) -> None:
        self.url = objects.url
        self._objects = objects
        self._meter = meter

    def put(self, name: str, data: Body, *, create: bool = True) -> bool:
        num_bytes = data.nbytes if isinstance(data, memoryview) else sum(map(len, data))
        with Call(self._meter, "put") as call:
            made = self._objects.put(name, data, create=create)
            call.num_bytes = num_bytes if made else 0
            call.result = "ok" if made else "existed"
        return made

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        with Call(self._meter, "get") as call:
            data = self._objects.read(name, begin, end, all_of_it=all_of_it)
            call.num_bytes = data.nbytes
        return data

    @contextmanager
    def reading(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        with ExitStack() as lent:
            with Call(self._meter, "get") as call:
                data = lent.enter_context(self._objects.reading(name, begin, end))
                call.num_bytes = data.nbytes
            yield data

    def read_head(self, name: str, num_bytes: int) -> Head:
        with Call(self._meter, "header") as call:
            head = self._objects.read_head(name, num_bytes)
            call.num_bytes = head.data.nbytes
        return head

    def size_of(self, name: str) -> int | None:
        with Call(self._meter, "head") as call:
            size = self._objects.size_of(name)
            call.result = "ok" if size is not None else str(Failure.ABSENT)
        return size

    def remove(self, names: Sequence[str]) -> None:
        with Call(self._meter, "delete") as call:
            call.is_request = bool(names)
            self._objects.remove(names)

    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        chunks = self._objects.listing(prefix)
        is_first = True
        while True:
            with Call(self._meter, "list") as call:
                chunk = next(chunks, None)
                call.is_request = is_first or chunk is not None
            if chunk is None:
                return
            is_first = False
            yield chunk

    def folders(self, prefix: str) -> list[str]:
        with Call(self._meter, "list"):
            return self._objects.folders(prefix)

    def remove_unfinished(self, prefix: str, before: float) -> None:
        self._objects.remove_unfinished(prefix, before)


def all_tenants(several: Sequence[BucketStats | None]) -> BucketStats | None:
    """The bucket as all tenants together see it; None where no tenant has one."""
    found = [one for one in several if one is not None]
    if len(found) < 2:
        return found[0] if found else None
    failed = [one for one in found if one.last_failure]
    last = min(failed, key=lambda one: one.last_failure_s, default=found[0])
    limits = [one.writable_bytes for one in found if one.writable_bytes is not None]
    return BucketStats(
        paused_s=max(one.paused_s for one in found),
        last_failure=last.last_failure,
        last_failure_s=last.last_failure_s,
        names=sum(one.names for one in found),
        packs_waiting=sum(one.packs_waiting for one in found),
        writable_bytes=sum(limits) if limits else None,
        calls={kind: _calls_together([one.calls[kind] for one in found]) for kind in KINDS},
    )


def _calls_together(several: Sequence[BucketCalls]) -> BucketCalls:
    results: Counter[str] = Counter()
    for one in several:
        results.update(one.results)
    times: Timings = together([one.times for one in several])
    return BucketCalls(
        results=dict(results), num_bytes=sum(one.num_bytes for one in several), times=times
    )
