"""kvferry's own client, of one server or of a fleet, on the source's work: put all blocks, get them
back, look them up."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import Pool, SharedPool, Work
from examples.processes import RemoteServer
from remote_server.client import ClientConfig, GetResult, PutResult, RemoteClient
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import WatchedList
from remote_server.protocol import Stretch
from remote_server.runs import begins_run
from remote_server.values import KiB, MiB, server_address

NUM_OUTSTANDING = 2
"""Batches in flight. With one, each batch would wait for a round trip."""

TRANSPORTS = ("tcp", "shm")

OVER_ZMQ = "zmq"
"""As tcp, without lanes: blocks are payload of ZeroMQ messages."""

WAYS = (*TRANSPORTS, OVER_ZMQ)
"""All ways of blocks between our client and a server."""

PATIENCE_S = 60.0
"""Deadline of every request here; long, because a benchmark reports slowness as a time."""

_GROUP = (0).to_bytes(4, "big")
_READY_S = 5.0
_POLL_S = 0.0005

T = TypeVar("T")


class WarmServer(RemoteServer):
    """A server whose memory has been faulted in, as that of one that has run for a while: a
    benchmark measures copies, and not a thread that touches pages beside them."""

    start_timeout_s = 120.0

    def __init__(self, memory: int, args: Sequence[str] = ()) -> None:
        super().__init__(memory=str(memory), args=args)
        populates = os.environ.get("KVFERRY_POPULATE", "true") != "false"
        self._resident = memory if populates and "--no-populate" not in args else 0

    def is_ready(self) -> bool:
        return super().is_ready() and _shared_bytes(self.pid) >= self._resident


def _shared_bytes(pid: int) -> int:
    """The shared memory of a process that is in RAM."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) * KiB


def server_for(num_bytes: int, block_bytes: int, args: Sequence[str] = ()) -> WarmServer:
    """A server that holds `num_bytes` in memory without evicting: a quarter more, for the waste of
    slabs. It has a GiB at least: windows over shared memory are a sixteenth of its memory."""
    memory = max(num_bytes + num_bytes // 4 + 64 * MiB, 16 * (block_bytes + 4096), 1024 * MiB)
    return WarmServer(memory, args)


class FleetClient(Fleet):
    """A fleet that a benchmark can clear."""

    def clear(self, namespace: str, *, forget: bool = False, timeout_s: float) -> "Future[None]":
        """As `RemoteClient.clear`, of every server; done when it returns."""
        for client in each_of(self):
            client.clear(namespace, forget=forget, timeout_s=timeout_s).result()
        done: Future[None] = Future()
        done.set_result(None)
        return done


Client = RemoteClient | FleetClient


def each_of(client: Client) -> list[RemoteClient]:
    """A client of each server."""
    return [*client.clients.values()] if isinstance(client, FleetClient) else [client]


def connect(
    server: str,
    namespace: str,
    block_bytes: int,
    *,
    transport: str = "tcp",
    integrity: bool = True,
    rows: Sequence[SharedPool] = (),
    keys: str = "",
    lanes: int = 0,
) -> RemoteClient:
    """A client of the server at this address (`tcp://…`, also with `?keys=FILE`) that is ready.
    `rows` is the shared memory of its blocks; with 0 it opens as many lanes as by default.

    Raises `Skipped` when this client, or this host, cannot use `transport`.
    """
    address = server_address(server)
    config = _config(address.endpoint, transport, integrity=integrity)
    config = replace(config, lanes=lanes or config.lanes, keys=keys or address.keys)
    client = RemoteClient(config)
    _prepare(client, 1, namespace, block_bytes, transport, rows)
    return client


def connect_to(
    servers: str,
    namespace: str,
    block_bytes: int,
    *,
    transport: str = "tcp",
    integrity: bool = True,
    rows: Sequence[SharedPool] = (),
) -> Client:
    """As `connect`, of one server or of a fleet: addresses with commas between them."""
    if "," not in servers:
        return connect(
            servers, namespace, block_bytes, transport=transport, integrity=integrity, rows=rows
        )
    watched = WatchedList(servers.split(","))
    members = watched.current.members
    config = _config(members[0].endpoint, transport, integrity=integrity)
    client = FleetClient(watched, config)
    _prepare(client, len(members), namespace, block_bytes, transport, rows)
    return client


def _config(endpoint: str, transport: str, *, integrity: bool) -> ClientConfig:
    config = ClientConfig(endpoint, client_name="benchmark", integrity=integrity)
    if transport == OVER_ZMQ:
        return replace(config, transport="tcp", lanes=0)
    return replace(config, transport=transport)


def wait_until_ready(client: Client) -> None:
    """Until the client may be used, for its own namespace. Raises `Skipped` after some seconds."""
    if not client.wait_until_ready(_READY_S):
        raise Skipped(f"no connection within {_READY_S:g} s")


def _prepare(
    client: Client, num_servers: int, namespace: str, block_bytes: int, transport: str,
    rows: Sequence[SharedPool],
) -> None:  # fmt: skip
    """Wait until all servers are ready. Raises `Skipped`, and closes the client then."""
    if rows:
        client.register(rows[0].region.view, rows[0].region.fd)
    client.declare(namespace, block_bytes)
    deadline = time.monotonic() + _READY_S
    while client.num_ready < num_servers or not _uses(client, transport):
        if time.monotonic() > deadline:
            whys = [one.lanes.reason for one in each_of(client)] if transport == "tcp" else []
            client.close()
            reasons = ", ".join(dict.fromkeys(filter(None, whys)))
            raise Skipped(
                f"no connection over {transport} within {_READY_S:g} s"
                + (f": {reasons}" if reasons else "")
            )
        time.sleep(0.01)


def _uses(client: Client, transport: str) -> bool:
    """Blocks go that way, so that a record's `tcp` is lanes: a server whose lanes are blocked is
    measured as `zmq`. A fleet opens its lanes at the first transfer."""
    if client.transport != ("tcp" if transport == OVER_ZMQ else transport):
        return False
    states = [one.lanes for one in each_of(client)]
    return transport != "tcp" or len(states) > 1 or all(one.num_open for one in states)


def anchors_of(client: Client, keys: Sequence[bytes], tokens: int) -> list[bytes | None]:
    """The anchors of the rows of one prompt from its first on, of so many tokens each. Empty for a
    client that needs none."""
    if not client.places_by_run:
        return []
    anchors: list[bytes | None] = []
    for place, key in enumerate(keys):
        begins = begins_run(place * tokens, (place + 1) * tokens)
        anchors.append(key if begins else anchors[-1])
    return anchors


def chain_of(keys: Sequence[bytes], tokens: int) -> list[Stretch]:
    """The chain fields of the rows of one prompt from its first on, of so many tokens each, as an
    engine's connector sends them."""
    return [Stretch(len(keys), 0, 0, tokens)]


def key_of(number: int) -> bytes:
    """A key as long as vLLM's: a hash of 32 bytes and a cache group of 4."""
    return b"block-%026d" % number + _GROUP


class FerryWork:
    """One client's side of the work. Block i is put from `source[i]` under key i.

    Every method waits for its result and raises unless all blocks arrived.
    """

    def __init__(
        self, client: Client, namespace: str, work: Work, row_tokens: int = blocks.BLOCK_SIZE
    ) -> None:
        """Each batch is a prompt of blocks of `row_tokens` tokens."""
        self.client = client
        self._namespace = namespace
        self._work = work
        self._keys = [[key_of(number) for number in batch.source] for batch in work.batches]
        self._anchors = [anchors_of(client, keys, row_tokens) for keys in self._keys]
        self._chains = [chain_of(keys, row_tokens) for keys in self._keys]
        self._all_chains = [stretch for chain in self._chains for stretch in chain]
        self._all_anchors = [anchor for anchors in self._anchors for anchor in anchors]
        self._all_keys = [key for keys in self._keys for key in keys]

    def clear(self) -> None:
        self.client.clear(self._namespace, timeout_s=PATIENCE_S).result()

    def put(self, source: Pool, *, deferred: bool) -> None:
        """Put all blocks until the replies. With `deferred` a reply precedes readability."""

        def submit(number: int) -> Future[PutResult]:
            places = self._work.batches[number].source
            return self.client.put(
                self._namespace, self._keys[number],
                [memoryview(source[place]) for place in places],
                deferred=deferred, timeout_s=PATIENCE_S, chain=self._chains[number],
                anchors=self._anchors[number],
            )  # fmt: skip

        results = self._each_batch(submit)
        created = sum(result.created for result in results)
        if created != self._work.num_blocks:
            raise AssertionError(f"{created} of {self._work.num_blocks} created: {results}")

    def put_until_readable(self, source: Pool) -> None:
        """Put all blocks deferred, and wait until they are readable."""
        self.put(source, deferred=True)
        self.wait_until_readable()

    def wait_until_readable(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.num_readable() < self._work.num_blocks:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.num_readable()} blocks readable after {PATIENCE_S} s")
            time.sleep(_POLL_S)

    def num_readable(self) -> int:
        return self.look_up(self._work.num_blocks)

    def look_up(self, num_keys: int) -> int:
        """How many of the first `num_keys` keys, of whole batches, are readable."""
        num_batches = -(-num_keys // len(self._keys[0]))
        found = self.client.lookup(
            self._namespace, self._all_keys[:num_keys], timeout_s=PATIENCE_S,
            chain=self._all_chains[:num_batches], anchors=self._all_anchors[:num_keys],
        )  # fmt: skip
        return found.result().prefix

    def get(self, target: Pool) -> None:
        """Get all blocks, streamed."""

        def submit(number: int) -> Future[GetResult]:
            places = self._work.batches[number].target
            return self.client.get(
                self._namespace, self._keys[number],
                [memoryview(target[place]) for place in places],
                stall_s=PATIENCE_S, timeout_s=PATIENCE_S, anchors=self._anchors[number],
            )  # fmt: skip

        for result in self._each_batch(submit):
            if len(result.landed) != len(result.outcomes):
                raise AssertionError(f"not all blocks came: {result.outcomes}, {result.error}")

    def contains(self) -> None:
        """Look up batch after batch; every key must be present."""
        for keys, chain, anchors in zip(self._keys, self._chains, self._anchors, strict=True):
            found = self.client.lookup(
                self._namespace, keys, timeout_s=PATIENCE_S, chain=chain, anchors=anchors
            ).result()
            if found.prefix != len(keys):
                raise AssertionError(f"{found.prefix} of {len(keys)} keys found")

    def make_present(self, source: Pool) -> None:
        """Before gets: put the blocks that a put's trial cleared."""
        if self.num_readable() < self._work.num_blocks:
            self.clear()
            self.put(source, deferred=False)

    def verify_kept(self, source: Pool, target: Pool) -> None:
        """Read all blocks back and compare each byte with the source."""
        self.wait_until_readable()
        blocks.poison(target)
        self.get(target)
        blocks.verify(source, target, self._work.everything)

    def _each_batch(self, submit: Callable[[int], Future[T]]) -> list[T]:
        """Submit batch after batch, by number, with at most `NUM_OUTSTANDING` unfinished."""
        waiting: deque[Future[T]] = deque()
        results: list[T] = []
        for number in range(len(self._keys)):
            if len(waiting) == NUM_OUTSTANDING:
                results.append(waiting.popleft().result())
            waiting.append(submit(number))
        return results + [future.result() for future in waiting]
