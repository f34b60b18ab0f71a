"""The real server with an emulated storage behind its gets, for sweeps only.

python -m … --memory SIZE --latency-ms MS --channels N --spread PERCENT

Lookups and puts are served as usual, from memory. A get is delayed by the time that a storage would
need for its blocks: each block occupies one of N channels for the latency, in parallel up to the
number of channels, and the get continues when its last block is done. From there on the code is the
real one: the same handlers, the same stream, the same bytes. So only the time of a slow storage is
emulated; no production code knows of it.

The time varies, as in every storage. A constant one would measure something else: clients whose
reads take equally long run in step, with all lookups at the same moment and none in between.
"""

import argparse
import heapq
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Sequence

from remote_server import protocol
from remote_server.allocator import keep_freed_memory
from remote_server.errors import RemoteProtocolError
from remote_server.server.config import ServerConfig
from remote_server.server.sending.times import RequestTimes
from remote_server.server.server import Server
from remote_server.turns import Steps, to_end
from remote_server.values import parse_bytes

MODULE = "benchmarks.store_sweep.load.slow_server"

Handle = Callable[[bytes, Sequence[memoryview], float | None], Steps[None] | None]
RequestTimesOf = Callable[[protocol.Get], RequestTimes]


class Channels:
    """Completion times of a storage that serves `num_channels` blocks at once.

    A block takes `latency_s` on average, uniformly within `spread` (a fraction of it) either way.
    """

    def __init__(self, latency_s: float, num_channels: int, spread: float) -> None:
        self._shortest_s = latency_s * (1 - spread)
        self._longest_s = latency_s * (1 + spread)
        self._free_at = [0.0] * num_channels
        self._random = random.Random(0)  # equal in each run

    def done_at(self, num_blocks: int, now: float) -> float:
        """The completion time of `num_blocks` requested now, behind all earlier ones."""
        done = now
        for _ in range(num_blocks):
            begins = max(now, self._free_at[0])
            ends = begins + self._random.uniform(self._shortest_s, self._longest_s)
            heapq.heapreplace(self._free_at, ends)
            done = max(done, ends)
        return done


class SlowGets:
    """Passes every message to `handle`, gets with a delay. Only the server's loop calls it."""

    def __init__(
        self, handle: Handle, channels: Channels, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._handle = handle
        self._channels = channels
        self._clock = clock
        self._waiting: list[tuple[float, int, bytes, Sequence[memoryview], float]] = []
        self._number = 0
        self._in_storage_s = 0.0
        """The emulated time of the get that is being passed on."""

    def handle(
        self, client: bytes, frames: Sequence[memoryview], arrived: float | None = None
    ) -> Steps[None] | None:
        num_blocks = _blocks_asked_for(frames)
        if not num_blocks:
            return self._handle(client, frames, arrived)
        self._number += 1
        now = self._clock()
        due = self._channels.done_at(num_blocks, now)
        since = now if arrived is None else arrived
        heapq.heappush(self._waiting, (due, self._number, client, frames, since))
        return None

    def timing(self, times_of: Callable[[protocol.Get], RequestTimes]) -> RequestTimesOf:
        """`times_of` with the emulated time booked as the storage's."""

        def times_with_storage(request: protocol.Get, /) -> RequestTimes:
            times = times_of(request)
            times.add_storage(self._in_storage_s)
            return times

        return times_with_storage

    def pass_due(self) -> int | None:
        """Pass on the gets that are due. Returns the milliseconds that the loop may wait for
        messages: 0 when there are replies to send, None without a limit."""
        answered = False
        while self._waiting and self._waiting[0][0] <= self._clock():
            due, _, client, frames, arrived = heapq.heappop(self._waiting)
            self._in_storage_s = due - arrived
            steps = self._handle(client, frames, arrived)
            if steps is not None:
                to_end(steps)
            answered = True
        if answered:
            return 0
        if not self._waiting:
            return None
        return max(0, math.ceil(1e3 * (self._waiting[0][0] - self._clock())))


class SlowServer(Server):
    """A server whose messages pass through `SlowGets`, and whose loop wakes for due gets."""

    def __init__(self, config: ServerConfig, channels: Channels) -> None:
        super().__init__(config)
        self._channels = channels

    def start(self) -> None:
        super().start()
        (tenant,) = self.tenants.values()
        self._slow = SlowGets(tenant.handlers.handle, self._channels)
        handlers = tenant.handlers
        handlers.handle = self._slow.handle  # type: ignore[method-assign]
        handlers.times_of = self._slow.timing(handlers.times_of)  # type: ignore[method-assign]

    def _patience_ms(self, more_to_do: bool) -> int:
        """Called in every turn of the loop, before it waits for messages."""
        due_ms = self._slow.pass_due()
        patience_ms = super()._patience_ms(more_to_do)
        return patience_ms if due_ms is None else min(patience_ms, due_ms)


def _blocks_asked_for(frames: Sequence[memoryview]) -> int:
    """The number of blocks of a get; 0 for all other and for unreadable messages."""
    if len(frames) != 2:
        return 0
    try:
        request = protocol.decode_request(frames[1])
    except RemoteProtocolError:
        return 0
    return len(request.keys) if isinstance(request, protocol.Get) else 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--memory", type=parse_bytes, required=True)
    parser.add_argument("--latency-ms", type=float, required=True)
    parser.add_argument("--channels", type=int, required=True)
    parser.add_argument("--spread", type=float, required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keep_freed_memory()
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=arguments.memory, shared_memory=False, name=arguments.name
    )
    channels = Channels(arguments.latency_ms / 1e3, arguments.channels, arguments.spread / 100)
    server = SlowServer(config, channels)
    server.run(on_ready=lambda ready: print(f"ready on {ready.endpoint}", flush=True))


if __name__ == "__main__":
    main()
