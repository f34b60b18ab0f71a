"""The server's handlers without its sockets: messages in, replies out, and every book at hand."""

import logging
import os
import select
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import zmq
from descriptors import memfd
from wire_peer import TICKETS_BYTES

from remote_server import protocol
from remote_server.guard import Guard
from remote_server.native.moves import Moves
from remote_server.plain_text import FewLines
from remote_server.server.config import TenantConfig
from remote_server.server.entrance.connections import Connections
from remote_server.server.entrance.hellos import PeerCheck
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.lanes.transport import LaneTransport
from remote_server.server.loop_context import LoopContext
from remote_server.server.meters import Meters
from remote_server.server.reports.identity import Identity
from remote_server.server.reports.recording import Recorder
from remote_server.server.requests.dispatch import Handlers
from remote_server.server.requests.transports import Transports
from remote_server.server.sending.bounds import InFlight
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.sending.replies import Replies
from remote_server.server.sending.send_queue import SendQueues
from remote_server.server.shm.fills import Fills
from remote_server.server.shm.leases import Leases
from remote_server.server.shm.regions import Regions
from remote_server.server.shm.transport import ShmTransport
from remote_server.server.transfer import get, put
from remote_server.server.transfer.copier import Copier
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.hot_keys import HotKeys
from remote_server.server.transfer.put import Puts
from remote_server.server.zmq.transport import ZmqTransport
from remote_server.shm.mapping import Arena
from remote_server.shm.region import Region
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.write_behind import BlocksBelow
from remote_server.store.store import Store
from remote_server.turns import none_in, to_end

log = logging.getLogger(__name__)

MEMORY = 256 << 10  # 16 slabs of 16 KiB
REGION_BYTES = 64 << 10
PATIENCE_S = 30.0


class Router:
    """Takes what is sent to each client. A client can be full for now, or gone."""

    def __init__(self) -> None:
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.sent: list[tuple[bytes, list[bytes]]] = []
        self._message: list[bytes] = []

    def send(self, frame: "bytes | zmq.Frame", flags: int = 0) -> None:
        data = bytes(frame.buffer) if isinstance(frame, zmq.Frame) else bytes(frame)
        if not self._message:
            if data in self.full:
                raise zmq.Again
            if data in self.gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._message.append(data)
        if not flags & zmq.SNDMORE:
            client, *frames = self._message
            self.sent.append((client, frames))
            self._message = []


class Posted(SendQueues):
    """Send queues that record each reply when it is made, sent or not."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.replies: list[tuple[bytes, protocol.Reply]] = []

    def post(self, client: bytes, outgoing: OutgoingMessage, *, at_once: bool = False) -> None:
        self.replies.append((client, protocol.decode_reply(outgoing.frames[1])))
        super().post(client, outgoing, at_once=at_once)


class HandlerBench:
    """Everything of the server `cache-1` but its loop, its sockets and its address. Time stands
    still until a test adds to `now`."""

    def __init__(self, below: Sequence[BlocksBelow] = ()) -> None:
        self.now = 1000.0
        self.arena = Arena(MEMORY)
        self.tier = MemoryTier(self.arena)
        self.store = Store(self.tier, self.clock, below)
        self.copier = Copier()
        self.router = Router()
        self.send_queues = Posted(self.router, self.tier.unpin_all)
        self.leases = Leases(self.tier.unpin_all, self.clock)
        self.moves = Moves(1)
        self.fills = Fills(self.moves)
        self.regions = Regions(self.store.counters, self.leases, self.fills, self.arena)
        self.meters = Meters(self.store.namespaces.known.__contains__, self.clock)
        guard = Guard(self.clock)
        self.replies = Replies(self.store, self.send_queues, self.meters, guard)
        self.identity = Identity(
            "cache-1", self.store, self.clock, lambda: self.handlers.draining,
            self.store.all_counters, lambda: None,
        )  # fmt: skip
        in_flight = InFlight(self.tier, 0)
        self.puts = Puts(self.store, self.replies, none_in(put.UNENDED), self.identity.load)
        self.gets = Gets(
            self.store, self.send_queues, in_flight, self.replies, none_in(get.UNENDED),
            HotKeys(self.clock, self.store.tier_stack.explain),
        )  # fmt: skip
        loop = LoopContext(zmq.Poller(), self.clock, guard, lambda: None)
        lanes = ServerLanes(loop, Connections(0, [""]))
        local = SimpleNamespace(name="socket", secret=b"")
        self.transports = Transports(
            LaneTransport(self.puts, self.gets, self.copier, lanes, ""),
            ShmTransport(self.puts, self.gets, self.regions, local),
            ZmqTransport(self.puts, self.gets, self.copier, ""),
        )
        peers = PeerCheck(FewLines(log, self.clock), "cache-1", in_flight.per_client)
        self.handlers = Handlers(
            TenantConfig(name="", memory=MEMORY), self.store, self.replies, self.transports,
            self.identity, peers, Recorder(self.clock),
        )  # fmt: skip
        self.region: Region | None = None

    def clock(self) -> float:
        return self.now

    def copy_on_threads(self) -> None:
        """From now on threads copy from regions, however few bytes there are."""
        self.moves.close()
        self.moves = self.fills.moves = Moves(1, run_here_below_bytes=0)

    def handle(self, client: bytes, frames: Sequence[bytes]) -> None:
        steps = self.handlers.handle(client, [memoryview(frame) for frame in frames])
        if steps is not None:
            to_end(steps)

    def ask(
        self, request: protocol.Request, *payload: bytes, client: bytes = b"c"
    ) -> protocol.Reply:
        """The last reply so far: that to this request, if it has one at once."""
        self.handle(client, [*protocol.encode(request), *payload])
        return self.send_queues.replies[-1][1]

    def attach(self, token: int) -> None:
        """A client's region, by a name that the test can repeat."""
        files = [memfd(REGION_BYTES), memfd(TICKETS_BYTES)]
        self.region = Region(files[0], REGION_BYTES, files[1], os.getuid())
        self.region.token = token
        self.regions.attached(self.region)
        self.files = files

    def write_row(self, offset: int, data: bytes) -> None:
        os.pwrite(self.files[0], data, offset)

    def set_ticket(self, ticket: int, value: int) -> None:
        os.pwrite(self.files[1], value.to_bytes(8, "little"), 8 * ticket)

    def detach(self) -> None:
        if self.region is not None:
            self.regions.gone(self.region)
            self.region.close()
            self.region = None
            for fd in self.files:
                os.close(fd)

    def turn(self) -> None:
        """What the loop does after requests, until nothing is left to be copied or sent."""
        deadline = time.monotonic() + PATIENCE_S
        while self.copier.busy:
            assert time.monotonic() < deadline, "a copy never ends"
            self.copier.copy_some()
        while self.fills.busy:
            assert time.monotonic() < deadline, "a put is never full"
            if not self.fills.fill_some() and self.fills.busy:
                select.select([self.moves], [], [], PATIENCE_S)
                self.moves.finish()
        while self.send_queues.send_some():
            pass
        self.send_queues.release()
        self.regions.expire_leases()

    def settle(self) -> None:
        """Every client reads on, or has left: what was waiting goes."""
        self.router.full.clear()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.turn()
            if not (self.send_queues.waiting or self.send_queues.in_flight):
                return
            assert time.monotonic() < deadline, "something is never sent"
            time.sleep(0)

    def close(self) -> None:
        self.detach()
        self.copier.stop()
        self.moves.close()
        self.arena.close()

    def changes(self) -> tuple[object, ...]:
        """What a refused request must leave as it was."""
        counters = Counter(self.store.all_counters())
        for name in [*counters]:
            if name.startswith(("bad_messages_", "refused_", "integrity_length")):
                del counters[name]
        return (
            self.tier.stats(),
            counters,
            len(self.leases),
            self.fills.num_waiting,
            [*self.store.namespaces.known],
        )
