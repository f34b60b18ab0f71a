"""Costs: the CPU time of a server's threads for one lookup, one put and one get.

One client, one call at a time, on a server that is full, as one that has run for a while: each put
evicts as many blocks as it brings. Blocks are small, so that their bytes take the loop nothing;
calls that move 16 MiB stand beside them. Keys of puts have been looked up before, as an engine's.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple
from urllib.request import urlopen

from benchmarks.harness import machine
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.capacity.calls import Calls, Prompt, prompts
from benchmarks.remote_kv_cache.baseline.threads.thread_times import (
    SERVER,
    SERVER_MOVERS,
    SERVER_ZMQ,
    ThreadTimes,
)
from benchmarks.remote_kv_cache.work.ferry_client import OVER_ZMQ, PATIENCE_S, WarmServer
from examples.processes import free_port
from remote_server.values import GiB, KiB, MiB, format_bytes

LOOKUP_FOUND, LOOKUP_ABSENT, PUT, GET = "lookup, found", "lookup, not found", "put", "get"
LOOKUP_KEYS = (64, 1000)
BLOCKS = (1, 8, 64)
SMALL, LARGE = KiB, 2 * MiB
LARGE_BLOCKS = 8

LOOP, ZMQ, MOVERS, MESSAGES, TIME = "loop", "libzmq", "movers", "messages", "time"
"""Of one call: microseconds of CPU of the server's threads, messages, and microseconds of time."""

_MEMORY = {SMALL: 128 * MiB, LARGE: 1 * GiB}
_FILL = 256 * KiB
_MESSAGES = {
    LOOKUP_FOUND: ("lookup",), LOOKUP_ABSENT: ("lookup",),
    PUT: ("put", "put_lane", "put_shared"), GET: ("get", "get_lane", "get_shared"),
}  # fmt: skip
"""Of the server's operations."""

_SNAPSHOT_S = 0.15
"""After so long the server's page has all requests that were answered before."""


class Cost(NamedTuple):
    """Of one call, median."""

    loop: float
    """Microseconds of the server's loop."""

    messages: float


class Call(NamedTuple):
    """The key of a case."""

    operation: str
    number: int
    """Keys of a lookup, blocks of a put or a get."""

    transport: str
    block_bytes: int = SMALL

    def __str__(self) -> str:
        return f"{self.title}, {self.transport}"

    @property
    def title(self) -> str:
        """Without the transport."""
        things = "keys" if self.operation in (LOOKUP_FOUND, LOOKUP_ABSENT) else "blocks"
        name = f"{self.operation}: {self.number:,} {things if self.number > 1 else things[:-1]}"
        return name if self.block_bytes == SMALL else f"{name} of {format_bytes(self.block_bytes)}"


def measure(
    runner: Runner, record: Record, transports: Sequence[str], operations: int, memory: int | None
) -> dict[Call, Cost]:
    """The cost of each call, also as figures of `record`. `operations` is the number
    of calls of a trial, of small ones; a trial has fewer calls of more than 64 keys or blocks.
    Raises `Skipped` where memory lacks."""
    machine.skip_unless_fits(2 * sum(_MEMORY.values()), memory)
    costs: dict[Call, Cost] = {}
    for block_bytes in (SMALL, LARGE):
        if runner.interrupted:
            break
        with ExitStack() as stack:
            server = _Server(stack, block_bytes)
            cases: list[Case] = []
            for transport in transports:
                try:
                    cases += server.cases(stack, transport, operations, is_first=not cases)
                except Skipped as reason:
                    record.parameters[transport] = f"skipped: {reason}"
            title = f"calls, blocks of {format_bytes(block_bytes)}"
            samples = runner.measure(title, cases)
            for call, taken in server.taken.items():
                if samples[call].measured:
                    each = samples[call].timed(taken)
                    values = {name: median(one[name] for one in each) for name in each[0]}
                    rounds = {LOOP: [one[LOOP] for one in each]}
                    costs[call] = Cost(values[LOOP], values[MESSAGES])
                    record.figures.append(Figure(call.title, "µs", values, call.transport, rounds))
                elif why := samples[call].failed:
                    record.parameters[str(call)] = f"FAILED: {why}"
    return costs


class _Server:
    """A server that is full of blocks of one size."""

    def __init__(self, stack: ExitStack, block_bytes: int) -> None:
        port = free_port()
        self._admin = f"http://127.0.0.1:{port}"
        self._server = stack.enter_context(
            WarmServer(_MEMORY[block_bytes], ["--admin", self._admin])
        )
        self._block_bytes = block_bytes
        self._next = count()
        """Of prompts, so that no key is used twice."""
        self.taken: dict[Call, list[Mapping[str, float]]] = {}
        self._messages: dict[Call, float] = {}
        """Of one call, counted at its first trial."""
        a_fill = max(LARGE_BLOCKS, _FILL // block_bytes)
        filler = Calls(stack, self._server.endpoint, "calls", OVER_ZMQ, a_fill, block_bytes)
        for _ in range(_MEMORY[block_bytes] // (a_fill * block_bytes) + 1):
            filler.keep(*self._new(1, a_fill))

    def _new(self, number: int, num_keys: int) -> list[Prompt]:
        first = next(self._next)
        return prompts(first << 32, number, num_keys)

    def cases(
        self, stack: ExitStack, transport: str, operations: int, *, is_first: bool
    ) -> Iterator[Case]:
        """Lookups are the same over all transports, and measured over the first one only."""
        most = max(*BLOCKS, *LOOKUP_KEYS) if self._block_bytes == SMALL else LARGE_BLOCKS
        calls = Calls(
            stack, self._server.endpoint, "calls", transport, most, self._block_bytes
        )  # fmt: skip
        if self._block_bytes == LARGE:
            sizes: dict[str, Sequence[int]] = {PUT: (LARGE_BLOCKS,), GET: (LARGE_BLOCKS,)}
            operations = max(1, operations // 10)
        else:
            lookups = LOOKUP_KEYS if is_first else ()
            sizes = {LOOKUP_FOUND: lookups, LOOKUP_ABSENT: lookups, PUT: BLOCKS, GET: BLOCKS}
        for operation, numbers in sizes.items():
            for number in numbers:
                call = Call(operation, number, transport, self._block_bytes)
                yield self._case(call, calls, max(1, min(operations, 64 * operations // number)))

    def _case(self, call: Call, calls: Calls, operations: int) -> Case:
        taken = self.taken[call] = []
        there = self._new(operations, call.number)
        now: list[Prompt] = []
        """Of the trial: present before lookups and gets, new ones otherwise."""

        def prepare() -> None:
            now[:] = there
            if call.operation in (PUT, LOOKUP_ABSENT):
                now[:] = self._new(operations, call.number)
            for prompt in now:
                if call.operation == PUT:
                    calls.look_up(prompt, found=False)
                elif call.operation != LOOKUP_ABSENT:
                    calls.keep(prompt)
            calls.poison()

        one: dict[str, Callable[[Prompt], None]] = {
            LOOKUP_FOUND: partial(calls.look_up, found=True),
            LOOKUP_ABSENT: partial(calls.look_up, found=False),
            PUT: calls.put,
            GET: calls.get,
        }

        def run() -> None:
            taken.append(self._taken(partial(_each, one[call.operation], now), call, operations))

        def verify() -> None:
            if call.operation == GET:
                calls.verify(call.number)

        return Case(call, run, prepare, verify)

    def _taken(self, run: Callable[[], None], call: Call, operations: int) -> Mapping[str, float]:
        """By one call of `operations`."""
        times = ThreadTimes(self._server.pid)
        if call in self._messages:
            times.around(run)
        else:
            before = self._num_messages(call)
            times.around(run)
            self._messages[call] = (self._num_messages(call) - before) / operations
        (spent,) = times.trials
        names = {LOOP: SERVER, ZMQ: SERVER_ZMQ, MOVERS: SERVER_MOVERS}
        return {
            **{name: spent.ran[who] / operations / 1e3 for name, who in names.items()},
            MESSAGES: self._messages[call],
            TIME: spent.time_ns / operations / 1e3,
        }

    def _num_messages(self, call: Call) -> int:
        """Requests that the server has answered."""
        time.sleep(_SNAPSHOT_S)
        with urlopen(f"{self._admin}/stats", timeout=PATIENCE_S) as reply:
            counts = json.load(reply)["operations"]
        return sum(int(counts[name]["count"]) for name in _MESSAGES[call.operation])


def _each(call: Callable[[Prompt], None], of: Sequence[Prompt]) -> None:
    for prompt in of:
        call(prompt)
