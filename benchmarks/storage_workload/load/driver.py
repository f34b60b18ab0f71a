"""The driver of a load: users that wait for their answers, or arrivals at given times.

Closed loop: each user sends a request, waits for its answer, thinks, and sends the next. So a slow
store gets fewer requests, and no queue grows without end. Open loop: requests arrive at a rate, or
at the times of a trace, independent of earlier ones.

One request: the cached beginning of its prompt is looked up and read; missing blocks are stored
again, because an engine would have computed them; then new blocks are stored; its own entry is read
as often as the source's decoding reads it; and the generation takes its time.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from benchmarks.storage_workload.backends.backend import Backend, Part, WriteDone
from benchmarks.storage_workload.figures.samples import (
    Moment,
    RequestSample,
    Samples,
    TransferSample,
)
from benchmarks.storage_workload.load.slots import PrioritySlots
from benchmarks.storage_workload.traffic.entries import NO_BLOCKS, AnyEntry, Blocks, Entry, Kind
from benchmarks.storage_workload.traffic.models import BlockShape
from benchmarks.storage_workload.traffic.requests import Request

MAX_WORKERS = 500
MOMENT_EVERY_S = 1.0

END_PATIENCE_S = 60.0
"""Seconds for the store to finish. Then the run ends, and the accounting fails and counts them."""

GENERATION_S = {"none": 0.0, "fast": 0.002, "realistic": 0.030}
"""Seconds for each generated token."""


class Source(Protocol):
    """The origin of a user's requests."""

    def requests_of(self, user: int) -> Iterator[Request]: ...


@dataclass(frozen=True)
class Pace:
    """The rate of requests and the concurrency of their service."""

    generation_s_per_token: float = 0.0
    think_scale: float = 1.0
    max_workers: int = MAX_WORKERS
    max_allocations: int = 0
    """Writes at a time; 0 is without limit."""

    max_requests: int = 0
    """Requests of each user; 0 is without limit."""


@dataclass
class _Cost:
    """The cost of one request so far."""

    queue_s: float = 0.0
    storage_s: float = 0.0
    system_hit_bytes: int = 0
    """Not a cost: bytes saved by a system prompt."""


class Driver:
    """One run against one backend. All events are recorded in `samples`.

    Must be made inside the event loop whose clock it uses.
    """

    def __init__(self, source: Source, backend: Backend, shape: BlockShape, pace: Pace) -> None:
        self.samples = Samples()
        self.num_active = 0
        """Active users."""

        self.preparing = "storing documents"
        """The work before the run, for a person to read."""

        self.num_stuck = 0
        """Tasks that still waited for the store `END_PATIENCE_S` after the end."""

        self._source = source
        self._backend = backend
        self._shape = shape
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._workers = PrioritySlots(pace.max_workers)
        self._allocations = PrioritySlots(pace.max_allocations)
        self._streams: dict[int, Iterator[Request]] = {}
        self._users: dict[int, asyncio.Task[None]] = {}
        self._wanted = 0
        self._in_flight = 0
        self._stopping = asyncio.Event()
        self._idling: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._tokens = 0
        self._moved = {"read": 0, "write": 0}
        self.started = self._loop.time()

    @property
    def elapsed_s(self) -> float:
        return self._loop.time() - self.started

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """End the run: no request is sent any more, and those in service end soon."""
        self._stopping.set()

    # ── before ───────────────────────────────────────────────────────────────────────────

    async def ingest(self, documents: Sequence[Sequence[Entry]]) -> None:
        """Store the documents of later questions, or as many as there is time for before `stop`.
        The run begins afterwards."""
        with suppress(_RunOver):
            for document in documents:
                for chunk in document:
                    await self._write(None, chunk.blocks(self._shape), "ingest", _Cost())
        self.started = self._loop.time()

    def note_write(self, purpose: str, done: WriteDone) -> None:
        """Record a write that no request has made."""
        self._add(None, purpose, "write", done.parts, done.waited_s)

    # ── closed loop ──────────────────────────────────────────────────────────────────────

    async def run_users(self, count: int, duration_s: float) -> None:
        """`count` users for `duration_s`, or until each has reached its limit."""
        self.set_users(count)
        async with self._watched():
            await self._until_end(duration_s)
        await self._end(list(self._users.values()))

    def set_users(self, count: int) -> None:
        """Set the number of active users. A user that is removed still receives its pending
        answer, and continues its conversation when it returns."""
        self._wanted = count
        for user in range(count):
            task = self._users.get(user)
            if task is None or task.done():
                self._users[user] = self._loop.create_task(self._run_user(user))
                self._users[user].add_done_callback(self._on_ended)

    async def _run_user(self, user: int) -> None:
        if user not in self._streams:
            most = self._pace.max_requests or None
            self._streams[user] = itertools.islice(self._source.requests_of(user), most)
        stream = self._streams[user]
        self.num_active += 1
        try:
            while user < self._wanted and not self._stopping.is_set():
                request = next(stream, None)
                if request is None:
                    return
                await self._idle(request.think_s * self._pace.think_scale)
                await self._serve(request)
        except _RunOver:
            pass
        finally:
            self.num_active -= 1

    async def _until_end(self, duration_s: float) -> None:
        deadline = self.started + duration_s
        stopping = self._loop.create_task(self._stopping.wait())
        try:
            while not self._stopping.is_set():
                # Users may be added meanwhile, so the list is read again each time.
                alive = [task for task in self._users.values() if not task.done()]
                left = deadline - self._loop.time()
                if left <= 0 or not alive:
                    return
                await asyncio.wait(
                    [stopping, *alive], timeout=min(left, MOMENT_EVERY_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )  # fmt: skip
        finally:
            stopping.cancel()

    # ── open loop ────────────────────────────────────────────────────────────────────────

    async def run_arrivals(
        self, requests: Iterator[tuple[float, Request]], duration_s: float
    ) -> None:
        """Each request at its time, in seconds since the run began, until `duration_s`."""
        tasks: set[asyncio.Task[None]] = set()
        async with self._watched():
            for arrival_s, request in requests:
                if arrival_s > duration_s:
                    await self._pause(duration_s - self.elapsed_s)
                    break
                await self._pause(arrival_s - self.elapsed_s)
                if self._stopping.is_set():
                    break
                task = self._loop.create_task(self._serve(request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(self._on_ended)
            else:
                left = max(0.0, duration_s - self.elapsed_s)
                if tasks:
                    await asyncio.wait([*tasks], timeout=left)
        await self._end([*tasks])

    # ── one request ──────────────────────────────────────────────────────────────────────

    async def _serve(self, request: Request) -> None:
        arrived = self._loop.time()
        cost = _Cost()
        self._in_flight += 1
        try:
            async with self._workers.take(request.qos.priority):
                cost.queue_s += self._loop.time() - arrived
                asked, hit = await self._find(request, cost)
                chunks_asked, chunks_hit = await self._find_chunks(request, cost)
                if request.new is not None:
                    new = request.new.blocks(self._shape)
                    await self._write(request, new, "new", cost)
                    for _ in range(request.decode_reads):
                        await self._read(request, new, "decode", cost)
                began = self._loop.time()
                await self._idle(request.generation_tokens * self._pace.generation_s_per_token)
                ended = self._loop.time()
        except BaseException:
            self.samples.num_unfinished += 1
            raise
        finally:
            self._in_flight -= 1
        self._tokens += request.generation_tokens
        self.samples.requests.append(
            RequestSample(
                arrived - self.started, ended - self.started, request.user, request.number,
                request.qos.name, request.persona, request.phase, request.turn,
                request.context_tokens, request.generation_tokens,
                cost.queue_s, cost.storage_s, ended - began,
                asked[0], hit[0], asked[1], hit[1], chunks_asked, chunks_hit,
                cost.system_hit_bytes,
            )
        )  # fmt: skip

    async def _find(self, request: Request, cost: _Cost) -> tuple[tuple[int, int], tuple[int, int]]:
        """Read the cached beginning of the prompt. Returns blocks requested and found, of the
        system prompt and of the rest."""
        prefix, num_system = NO_BLOCKS, 0
        for entry in request.prefix:
            blocks = entry.blocks(self._shape)
            prefix += blocks
            if _is_system(entry):
                num_system += len(blocks.keys)
        if not prefix.keys:  # a new conversation, or a recorded prompt shorter than a block
            return (0, 0), (0, 0)
        hit = await self._read(request, prefix, "reuse", cost)
        if hit < len(prefix.keys):
            purpose = "recompute" if request.new is not None else "new"
            await self._write(request, prefix.part(hit), purpose, cost)
        system_hit = min(hit, num_system)
        cost.system_hit_bytes = prefix.part(0, system_hit).num_bytes
        return (num_system, len(prefix.keys) - num_system), (system_hit, hit - system_hit)

    async def _find_chunks(self, request: Request, cost: _Cost) -> tuple[int, int]:
        asked = hit = 0
        for chunk in request.chunks:
            blocks = chunk.blocks(self._shape)
            found = await self._read(request, blocks, "chunk", cost)
            asked += len(blocks.keys)
            hit += found
            if found < len(blocks.keys):
                await self._write(request, blocks.part(found), "recompute", cost)
        return asked, hit

    async def _read(self, request: Request, blocks: Blocks, purpose: str, cost: _Cost) -> int:
        began = self._loop.time()
        done = await self._backend.read(blocks)
        cost.storage_s += self._loop.time() - began
        self._add(request, purpose, "read", done.parts, done.waited_s)
        self._require_running()
        return done.blocks

    async def _write(
        self, request: Request | None, blocks: Blocks, purpose: str, cost: _Cost
    ) -> None:
        came = self._loop.time()
        async with self._allocations.take(request.qos.priority if request is not None else 0):
            began = self._loop.time()
            done = await self._backend.write(blocks)
            cost.queue_s += began - came
            cost.storage_s += self._loop.time() - began
        self._add(request, purpose, "write", done.parts, done.waited_s)
        self._require_running()

    def _add(
        self, request: Request | None, purpose: str, direction: str, parts: Sequence[Part],
        waited_s: float, ended: float | None = None,
    ) -> None:  # fmt: skip
        ended_s = (ended if ended is not None else self._loop.time()) - self.started
        user, number = (request.user, request.number) if request is not None else (-1, -1)
        for part in parts:
            if purpose != "behind":
                self._moved[direction] += part.num_bytes
            self.samples.transfers.append(
                TransferSample(ended_s, user, number, purpose, direction, *part, waited_s)
            )

    # ── around it ────────────────────────────────────────────────────────────────────────

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        """Record a moment every second while the block runs, and one at its end."""
        watch = self._loop.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self.samples.elapsed_s = self.elapsed_s
            await self._note_moment()

    async def _watch(self) -> None:
        while True:
            await self._note_moment()
            await asyncio.sleep(MOMENT_EVERY_S)

    async def _note_moment(self) -> None:
        occupancy = await self._backend.occupancy()
        self.take_behind()
        self.samples.moments.append(
            Moment(
                self.elapsed_s, self.num_active, self._in_flight, len(self.samples.requests),
                self._tokens, self._moved["read"], self._moved["write"],
                {tier: state.used_bytes for tier, state in occupancy.items()},
            )
        )  # fmt: skip

    def take_behind(self, purpose: str = "behind") -> None:
        """Record the writes behind that ended since the last call."""
        for behind in self._backend.take_behind():
            self._add(None, purpose, "write", [behind.part], 0.0, behind.ended_s)

    def _on_ended(self, ended: "asyncio.Task[None]") -> None:
        """End the run after an error of the store or the driver; `_end` raises it."""
        error = None if ended.cancelled() else ended.exception()
        if error is not None and not isinstance(error, _RunOver):
            self._failure = self._failure or error
            self._stopping.set()

    def _require_running(self) -> None:
        """Raises `_RunOver` when the run is over."""
        if self._stopping.is_set():
            raise _RunOver

    async def _idle(self, seconds: float) -> None:
        """Sleep. The task has no work in the store, so the end of the run may cancel it."""
        self._require_running()
        if seconds <= 0:
            await asyncio.sleep(0)  # a store without delays must not starve other tasks
            return
        task = asyncio.current_task()
        assert task is not None
        self._idling.add(task)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._idling.discard(task)

    async def _pause(self, seconds: float) -> None:
        """Sleep, at most until the run is over."""
        if seconds > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Cancel the tasks that wait for an answer. The store finishes its work, so that its
        counts agree with the driver's."""
        self._stopping.set()
        for task in [*self._idling]:
            task.cancel()
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=END_PATIENCE_S)
            self.num_stuck += len(stuck)
            for task in stuck:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure


class _RunOver(Exception):
    """The run is over: the task sends no more requests."""


def _is_system(entry: AnyEntry) -> bool:
    return isinstance(entry, Entry) and entry.kind is Kind.SYSTEM
