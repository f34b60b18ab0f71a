"""Puts on lanes that are cut off in each of their states, on handlers without a server's loop."""

import errno
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from gates import once
from handler_bench import PATIENCE_S, HandlerBench
from lane_peer import connected, frame, preamble, read
from wire_peer import block, key

from remote_server import protocol, turns
from remote_server.native import make_lanes
from remote_server.protocol import Hello, Lookup, Put
from remote_server.server import copier, get, put
from remote_server.server.connections import Connections
from remote_server.server.dispatch import Handlers
from remote_server.server.lanes import ServerLanes
from remote_server.store import gets
from remote_server.turns import Steps, to_end
from remote_server.values import LanesAddress

pytestmark = pytest.mark.real_time

CLIENT = b"client"
LENGTH = 4096
ALL = range(6)  # three parts of two keys
NUM_TURNS = 3


class LaneBench(HandlerBench):
    """Handlers, and one open lane of `CLIENT`, whose far end is `socket`."""

    def __init__(self) -> None:
        super().__init__()
        self.poller = zmq.Poller()
        self.lanes = ServerLanes(self.poller, self.clock, Connections(9, [""]))
        self.engine = make_lanes(1)
        self.lanes.begin(self.engine, LanesAddress("127.0.0.1", 0))
        self.handlers = Handlers(
            self.store, self.copier, self.send_queues, self.regions, "", lanes=self.lanes
        )
        self.ask(Hello(request_id=1, protocol=2, namespace="ns", block_bytes=LENGTH))
        opened = self.lanes.announce(2, self.store.epoch, "", CLIENT)
        self.number = opened.number
        self.socket = connected(opened.port)
        self.socket.sendall(preamble(opened.token))
        self.until(lambda: self.lanes.num_open == 1)
        read(self.socket, 8)

    def ask(self, request: protocol.Request) -> Steps[None] | None:
        frames = [memoryview(frame) for frame in protocol.encode(request)]
        return self.handlers.handle(CLIENT, frames)

    def until(self, condition: Callable[[], bool]) -> None:
        """Handle events of lanes until `condition` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never happens"
            events = dict(self.poller.poll(10))
            if events.pop(self.lanes.bell, 0):
                self.lanes.reap()
            self.lanes.handle(events)

    def begun(self, **fields: object) -> Steps[None]:
        """The steps of a put whose first part is reserved."""
        common = {
            "request_id": 3, "namespace": "ns", "keys": [key(n) for n in ALL],
            "lengths": [LENGTH] * len(ALL), "checksums": [], "lane": self.number, "deferred": True,
        }  # fmt: skip
        steps = self.ask(Put(**{**common, **fields}))
        assert steps is not None
        assert (self.under_way(), self.tier.stats().pending) == ({"reserving": 1}, 2)
        return steps

    def send(self, request_id: int = 3) -> None:
        """The bytes of such a put."""
        for n in ALL:
            data = block(n, LENGTH)
            checksum = protocol.checksum("ns", key(n), data)
            self.socket.sendall(frame(request_id, n, data, checksum))

    def queued(self, turns_taken: int) -> None:
        """A put whose bytes have come, with so many turns behind it."""
        to_end(self.begun())
        assert self.under_way() == {"filling": 1}
        self.send()
        self.until(lambda: self.copier.busy)
        for _ in range(turns_taken):
            self.copier.copy_some()

    def under_way(self) -> dict[str, int]:
        return {state: count for state, count in self.handlers.puts_in_state.items() if count}

    def answers(self) -> list[protocol.Reply]:
        """To the put."""
        return [reply for _, reply in self.send_queues.replies if reply.request_id == 3]

    def is_usable(self) -> bool:
        """The lane carries another put."""
        request = Put(
            request_id=9, namespace="ns", keys=[key(n) for n in ALL], lengths=[LENGTH] * 6,
            checksums=[], lane=self.number, deferred=True, force=True,
        )  # fmt: skip
        steps = self.ask(request)
        assert steps is not None
        to_end(steps)
        self.send(9)
        self.until(lambda: self.copier.busy)
        self.settle()
        reply = self.send_queues.replies[-1][1]
        return (reply.request_id, getattr(reply, "total", 0)) == (9, 6)

    def nothing_is_left(self) -> bool:
        self.until(lambda: not self.lanes.busy)
        self.settle()
        stats, counts = self.tier.stats(), self.store.counters
        ends = sum(
            n for name, n in counts.items() if name.startswith("put_") and "total" not in name
        )
        assert (stats.pinned, stats.pending, self.handlers.coming.total) == (0, 0, 0)
        assert (self.under_way(), self.lanes.busy, self.copier.busy) == ({}, False, False)
        assert counts["put_total"] == ends
        self.store.tier_stack.check()
        return True

    def close(self) -> None:
        self.socket.close()
        self.lanes.close()
        super().close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaneBench]:
    """A step is two keys."""
    for module in (turns, gets, copier, put, get):
        monkeypatch.setattr(module, "KEYS_PER_STEP", 2)
    bench = LaneBench()
    yield bench
    bench.close()


def test_a_put_passes_its_states_and_is_answered_once(bench):
    bench.queued(0)
    assert bench.under_way() == {"filling": 1}, "its bytes have come, and no turn"
    assert bench.nothing_is_left()
    assert [reply.created for reply in bench.answers()] == [len(ALL)]


def leave(bench: LaneBench) -> None:
    bench.lanes.forget([CLIENT])
    bench.router.gone.add(CLIENT)


def clear(bench: LaneBench) -> None:
    bench.store.clear(None)


def end_lane(bench: LaneBench) -> None:
    bench.socket.close()
    bench.until(lambda: not bench.lanes.num_open)


def stop(bench: LaneBench) -> None:
    bench.lanes.close()
    bench.copier.stop()


CUTS = pytest.mark.parametrize("cut", [leave, clear, end_lane, stop])


@CUTS
@pytest.mark.parametrize("turns_taken", range(NUM_TURNS + 1))
def test_a_put_whose_bytes_have_come_ends_once_at_any_turn(bench, cut, turns_taken):
    bench.queued(turns_taken)
    cut(bench)
    assert bench.nothing_is_left()
    assert len(bench.answers()) == 1


@CUTS
@pytest.mark.parametrize("num_bytes", [0, 10, 16, 4000, 2 * 4120, 6 * 4120 - 1])
def test_a_put_whose_bytes_are_on_their_way_ends_once(bench, cut, num_bytes):
    to_end(bench.begun())
    sent = b"".join(
        frame(3, n, block(n, LENGTH), protocol.checksum("ns", key(n), block(n, LENGTH)))
        for n in ALL
    )
    bench.socket.sendall(sent[:num_bytes])
    cut(bench)
    if cut is clear:
        bench.socket.sendall(sent[num_bytes:])
    bench.until(lambda: not bench.lanes.busy)
    assert bench.nothing_is_left()
    assert len(bench.answers()) == 1
    assert bench.ask(Lookup(request_id=4, namespace="ns", keys=[key(n) for n in ALL])) is None
    assert bench.send_queues.replies[-1][1].states == bytes(len(ALL))


def test_a_put_whose_client_leaves_while_slots_are_reserved_leaves_none(bench):
    bench.begun().close()
    leave(bench)
    assert bench.nothing_is_left()
    assert bench.answers() == []


def test_a_put_whose_namespace_is_forgotten_meanwhile_is_refused_and_dropped(bench):
    steps = bench.begun()
    bench.store.clear("ns", forget=True)
    to_end(steps)
    assert [reply.code for reply in bench.answers()] == ["unknown_namespace"]
    bench.send()
    bench.ask(Hello(request_id=5, protocol=2, namespace="ns", block_bytes=LENGTH))
    assert bench.is_usable()
    assert bench.nothing_is_left()


@pytest.mark.parametrize("turns_taken", range(NUM_TURNS))
def test_a_put_whose_publication_raises_is_answered_once(bench, turns_taken, monkeypatch):
    bench.queued(turns_taken)
    once(monkeypatch, bench.store.puts, "end")
    bench.settle()
    assert len(bench.answers()) == 1
    assert (bench.under_way(), bench.handlers.coming.total) == ({}, 0)
    assert bench.is_usable()


def test_a_lane_without_memory_for_a_job_ends_and_so_does_the_put(bench, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(type(bench.engine), "submit", refuse)
    to_end(bench.begun())
    assert bench.nothing_is_left()
    assert [reply.declined for reply in bench.answers()] == [{"withdrawn": len(ALL)}]
    assert bench.lanes.counters["lanes_ended_failed"] == 1
