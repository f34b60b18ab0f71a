"""The real server whose gets are of a bucket, for sweeps only.

python -m benchmarks.store_sweep.load.bucket_server --memory SIZE --bucket URL --pack SIZE

With --bind and --insecure it serves the clients of other machines: `store_sweep --server`.

A server serves from memory what it has there. This one forgets a block before its get, when the
bucket has it, and a get of blocks that are still being written waits until the bucket has them. So
every read comes from the object store, as those of the source's server do. From there on the code
is the real one: the lookups, the packs, the writes behind puts, the reads, the checksums.
"""

import argparse
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.store_sweep.load.slow_server import Handle
from remote_server import protocol
from remote_server.allocator import keep_freed_memory
from remote_server.errors import RemoteProtocolError
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.bucket.tier import BucketTier
from remote_server.store.memory.tier import MemoryTier
from remote_server.turns import Steps, to_end
from remote_server.values import parse_bytes

MODULE = "benchmarks.store_sweep.load.bucket_server"

PATIENCE_S = 10.0
"""A get whose blocks do not come into the bucket is served from memory."""

_POLL_MS = 1


class BucketGets:
    """Passes every message to `handle`; a get once the bucket has its blocks and memory has not.
    Only the server's loop calls it."""

    def __init__(
        self,
        handle: Handle,
        memory: MemoryTier,
        bucket: BucketTier,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_late = 0
        """Gets that were served from memory."""
        self._handle = handle
        self._memory = memory
        self._bucket = bucket
        self._clock = clock
        self._waiting: deque[tuple[float, protocol.Get, bytes, Sequence[memoryview], float]] = (
            deque()
        )

    def handle(
        self, client: bytes, frames: Sequence[memoryview], arrived: float | None = None
    ) -> Steps[None] | None:
        request = _get_in(frames)
        if request is None or self._forget(request):
            return self._handle(client, frames, arrived)
        now = self._clock()
        since = now if arrived is None else arrived
        self._waiting.append((now + PATIENCE_S, request, client, frames, since))
        return None

    def pass_due(self) -> int | None:
        """Pass on the gets whose blocks the bucket has. Returns the milliseconds that the loop may
        wait for messages: 0 when there are replies to send, None without a limit."""
        answered = False
        for _ in range(len(self._waiting)):
            one = late_at, request, client, frames, arrived = self._waiting.popleft()
            is_late = self._clock() >= late_at
            if not is_late and not self._forget(request):
                self._waiting.append(one)
                continue
            self.num_late += is_late
            steps = self._handle(client, frames, arrived)
            if steps is not None:
                to_end(steps)
            answered = True
        if answered:
            return 0
        return _POLL_MS if self._waiting else None

    def _forget(self, request: protocol.Get) -> bool:
        """Remove the blocks of `request` from memory if the bucket has all of them."""
        held = [self._bucket.peek(request.namespace, key) for key in request.keys]
        if None in held:
            return False
        for key in request.keys:
            block = self._memory.peek(request.namespace, key)
            if block is not None:
                self._memory.remove(block)
        return True


class BucketServer(Server):
    """A server whose messages pass through `BucketGets`."""

    def start(self) -> None:
        super().start()
        (tenant,) = self.tenants.values()
        assert tenant.storage.bucket is not None
        handlers = tenant.handlers
        self._gets = BucketGets(handlers.handle, tenant.store.memory, tenant.storage.bucket.tier)
        handlers.handle = self._gets.handle  # type: ignore[method-assign]

    def _patience_ms(self, more_to_do: bool) -> int:
        """Called in every turn of the loop, before it waits for messages."""
        due_ms = self._gets.pass_due()
        patience_ms = super()._patience_ms(more_to_do)
        return patience_ms if due_ms is None else min(patience_ms, due_ms)


def _get_in(frames: Sequence[memoryview]) -> protocol.Get | None:
    """None for all other and for unreadable messages."""
    if len(frames) != 2:
        return None
    try:
        request = protocol.decode_request(frames[1])
    except RemoteProtocolError:
        return None
    return request if isinstance(request, protocol.Get) else None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--memory", type=parse_bytes, required=True)
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--pack", type=parse_bytes, required=True)
    parser.add_argument("--name", default="")
    parser.add_argument("--bind", default="tcp://127.0.0.1:*")
    parser.add_argument(
        "--insecure", action="store_true", help="serve without keys on a network that is yours"
    )
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keep_freed_memory()
    config = ServerConfig(
        bind=arguments.bind, insecure=arguments.insecure, memory=arguments.memory,
        shared_memory=False,
        bucket=arguments.bucket, pack=arguments.pack, bucket_admit="all", bucket_write_rate=0,
        name=arguments.name,
    )  # fmt: skip
    server = BucketServer(config)
    server.run(on_ready=lambda ready: print(f"ready on {ready.endpoint}", flush=True))


if __name__ == "__main__":
    main()
