"""The same requests as those of `model_cache`, sent to a real server process by the client."""

import math
import mmap
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.remote_kv_cache.replay.caches import room as rooms
from benchmarks.remote_kv_cache.replay.caches.room import memory_for
from benchmarks.remote_kv_cache.replay.eviction.timed_server import SECONDS
from examples.processes import RemoteServer
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import Stretch
from remote_server.traces import Request, longest
from remote_server.traces.model_cache import NAMESPACE, Result, key_of
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

PAYLOAD = 1024
"""Bytes of a block."""

PATIENCE_S = 30.0

NO_SETTINGS: Mapping[str, Any] = {}


class TimedServer(RemoteServer):
    """A server whose eviction has the time that `set_time` sets."""

    def __init__(self, memory: str, clock: Path, args: Sequence[str]) -> None:
        super().__init__(memory, args=args)
        timed = "benchmarks.remote_kv_cache.replay.eviction.timed_server"
        self.command = [sys.executable, "-m", timed, f"{clock}", *self.command[3:]]


def require_size(capacity: int) -> None:
    """Raises `ConfigError` where no real server has about so many places."""
    rooms.require_size("--capacity", capacity, PAYLOAD, memory_for, can_change=False)


def places_for(capacity: int) -> int:
    """The places of a real server with room for so many blocks."""
    return memory_for(capacity, PAYLOAD).places


def replay(
    requests: Sequence[Request],
    capacity: int,
    policy: str,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> Result:
    """What `requests` find on a server with `--eviction` `policy`, one after the other. `settings`
    are those of the client."""
    room = memory_for(capacity, PAYLOAD)
    result = Result(policy, room.places)
    with _server(room.num_bytes, policy, settings) as (client, clock):
        rows = memoryview(bytearray(longest(requests) * PAYLOAD))
        views = [rows[at : at + PAYLOAD] for at in range(0, len(rows), PAYLOAD)]
        began = time.process_time()
        for request in requests:
            SECONDS.pack_into(clock, 0, request.arrival_s)
            found, written = _request(client, [key_of(one) for one in request.blocks], views)
            result.requested += len(request.blocks)
            result.found += found
            result.written += written
        result.seconds = time.process_time() - began
    return result


def _request(
    client: RemoteClient, keys: Sequence[bytes], views: Sequence[memoryview]
) -> tuple[int, int]:
    if not keys:
        return 0, 0
    chain = [Stretch(len(keys), 0, 0, TOKENS_PER_BLOCK)]
    lookup = client.lookup(NAMESPACE, keys, timeout_s=PATIENCE_S, chain=chain).result()
    found = lookup.prefix
    if found:
        got = client.get(
            NAMESPACE, keys[:found], views[:found], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
        ).result()
        assert len(got.landed) == found, f"{len(got.landed)} of {found} blocks arrived"
    if found == len(keys):
        return found, 0
    rest = [Stretch(len(keys) - found, 0, found * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)]
    put = client.put(
        NAMESPACE, keys[found:], views[found : len(keys)], deferred=False, timeout_s=PATIENCE_S,
        chain=rest,
    ).result()  # fmt: skip
    assert put.error is None, f"{put.error}"
    return found, put.created


@contextmanager
def _server(
    num_bytes: int, policy: str, settings: Mapping[str, Any]
) -> Iterator[tuple[RemoteClient, mmap.mmap]]:
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="kvferry-clock-"))
        file.write(SECONDS.pack(0.0))
        file.flush()
        clock = mmap.mmap(file.fileno(), SECONDS.size)
        server = TimedServer(f"{num_bytes}", Path(file.name), ["--eviction", policy])
        stack.enter_context(server)
        client = RemoteClient(ClientConfig(endpoint=server.endpoint, **settings))
        stack.callback(client.close)
        client.declare(NAMESPACE, PAYLOAD)
        client.wait_until_ready(math.inf)
        yield client, clock
