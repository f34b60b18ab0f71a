"""A client of a server and a link that are models, in virtual time.

It is a `CacheClient` for a tier: replies and blocks come at the times of the model, and the waits
of gets are those of the real client's queue. `advance` moves the time on, and ends what is due.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from math import inf

from remote_server.client import BreakerState, GetOutcome, GetResult, PutResult
from remote_server.client.cache_client import OneServer
from remote_server.client.cache_requests import GetRequest, LookupRequest, PutRequest
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.get_queue import GetQueue
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import EngineReport, Found, KeyState, StatsReply

WINDOW_BLOCKS = 8
"""Blocks that were requested and still cross the link when their get has ended."""


@dataclass
class Link:
    """How long a server and the way to it take. All times in seconds."""

    delay_s: float
    """From a request to the first byte of its reply."""
    block_s: float
    """Between two blocks."""
    jitter: float = 0.0
    """A delay is longer by up to so many times itself, at random."""
    pauses: Sequence[tuple[float, float]] = ()
    """Times between which nothing moves; the last may have no end."""
    seed: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def reply_at(self, now: float) -> float:
        """When the reply to a request comes that is sent now."""
        delay_s = self.delay_s * (1 + self._random.random() * self.jitter)
        return self.moved(now, delay_s)

    def moved(self, now: float, seconds: float) -> float:
        """The time at which something has moved for `seconds`, from `now` on."""
        for begin, end in self.pauses:
            if end <= now:
                continue
            if now + seconds <= begin:
                break
            seconds -= max(0.0, begin - now)
            now = end
        return now + seconds

    def arrivals(self, asked_at: float, num_blocks: int, free_at: float = 0.0) -> list[float]:
        """When so many blocks come that are requested at `asked_at`, over a link that is free from
        `free_at` on."""
        at, found = max(self.reply_at(asked_at), free_at), []
        for _ in range(num_blocks):
            at = self.moved(at, self.block_s)
            found.append(at)
        return found


class ModelledClient(OneServer):
    """Every block is on its server."""

    ready, absent, closed = True, False, False
    epoch = "boot"
    breaker = BreakerState.CLOSED
    queued_bytes = 0
    transport = "tcp"

    def __init__(self, link: Link) -> None:
        self.link = link
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._queue = GetQueue()
        self._free_at = 0.0
        self.num_ended = 0
        """Requests that have ended, and replies that came late."""

    def clock(self) -> float:
        return self.now

    @property
    def next_at(self) -> float:
        """When something is due."""
        return min(self._due[0][0] if self._due else inf, self._queue.wake_at())

    def advance(self, until: float) -> None:
        """Let time pass up to `until`."""
        while (at := self.next_at) <= until:
            self.now = max(self.now, at)
            while self._due and self._due[0][0] <= self.now:
                heapq.heappop(self._due)[2]()
            self._expire()
        self.now = max(self.now, until)

    def _at(self, time_s: float, do: Callable[[], None]) -> None:
        if time_s < inf:
            heapq.heappush(self._due, (time_s, next(self._numbers), do))

    # ── what a tier asks ─────────────────────────────────────────────────────────────────

    def send_lookup(self, asked: LookupRequest) -> "Future[Found]":
        reply: Future[Found] = Future()
        num_keys, on_late = len(asked.keys), asked.on_late
        states = bytes([KeyState.READABLE]) * num_keys
        found = Found(request_id=1, epoch="boot", prefix=num_keys, states=states)
        comes_at, ends_at = self.link.reply_at(self.now), self.now + asked.timeout_s
        if comes_at <= ends_at:
            self._at(comes_at, lambda: self._ends(reply.set_result, found))
        else:
            late = DeadlineExceeded("lookup")
            self._at(ends_at, lambda: self._ends(reply.set_exception, late))
            if on_late is not None:
                self._at(comes_at, lambda: self._ends(on_late, found))
        return reply

    def send_get(self, asked: GetRequest) -> "Future[GetResult]":
        future: Future[GetResult] = Future()
        get = GetTransfer(
            future, asked.namespace, asked.keys, asked.rows, asked.stall_s, asked.timeout_s,
            asked.worth_s,
        )  # fmt: skip
        get.deadline = self.now + asked.timeout_s
        get.prepare(get.rows)
        self._queue.add(get, self.now)
        num_keys = len(asked.keys)
        get.requested(num_keys)
        self._block_comes(get, 0, self.link.arrivals(self.now, num_keys, self._free_at))
        return future

    def _block_comes(self, get: GetTransfer, number: int, arrivals: Sequence[float]) -> None:
        def came() -> None:
            if get.ended:
                return
            get.settle_hits([number], get.rows[number].nbytes)
            self._queue.progressed(get, self.now)
            if not get.num_open:
                self._end(get, None, GetOutcome.MISS)
            else:
                self._block_comes(get, number + 1, arrivals)

        last = min(number + WINDOW_BLOCKS, len(arrivals)) - 1
        self._free_at = max(self._free_at, arrivals[last] if arrivals[last] < inf else 0.0)
        self._at(arrivals[number], came)

    def _expire(self) -> None:
        for get, _, stalls_at in self._queue.stall_times():
            if min(stalls_at, get.deadline) <= self.now:
                outcome, error = get.stalled()
                self._end(get, error, outcome)

    def _end(self, get: GetTransfer, error: DeadlineExceeded | None, outcome: GetOutcome) -> None:
        self._queue.remove(get)
        self._ends(get.end, error, outcome)

    def _ends(self, how: Callable[..., object], *about: object) -> None:
        self.num_ended += 1
        how(*about)

    def send_put(self, asked: PutRequest) -> "Future[PutResult]":
        raise AssertionError("every block is there already")

    def declare(
        self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str] = {}
    ) -> None:
        """Every namespace is welcome."""

    def report(self, report: EngineReport) -> None:
        """There is no page."""

    def register(self, view: memoryview, fd: int) -> None:
        """The bytes of rows do not matter here."""

    def forget(self, namespace: str) -> None:
        """Every block stays."""

    def send_touch(self, namespace: str, keys: list[bytes], timeout_s: float) -> "Future[int]":
        return Future()  # every block stays

    def send_stats(self, timeout_s: float, *, fingerprints: bool) -> "Future[StatsReply]":
        return Future()  # no reply: there are no other engines

    def counters(self) -> dict[str, int]:
        return {}

    def cancel_all(self, timeout_s: float) -> bool:
        for get in self._queue:
            self._end(get, DeadlineExceeded("cancelled"), GetOutcome.LATE)
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        self.cancel_all(timeout_s)
