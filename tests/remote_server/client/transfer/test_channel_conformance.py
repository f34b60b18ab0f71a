"""Conformance of data channels: over each transport, in each state, a put or a get ends once.

Afterwards nothing of it is registered, pinned, leased or in flight. A new transport is one more
value of the fixture `transport`; a state that it does not have is skipped there.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    io_thread_held,
    key,
    rows_of,
    turn,
    wait_for_lanes,
    wake,
)
from counting_channel import COUNTED, CountingChannel, open_channels
from fake_server import PATIENCE_S, Asked, FakeServer, eventually
from held import Point
from msgspec.structs import replace
from shared_messages import SharedGet, SharedPut, kind_of

from remote_server import protocol
from remote_server.client import GetOutcome, IoThread, RemoteClient, loop, remote_client
from remote_server.client.connection.channel import Channel
from remote_server.client.shm import get as shm_gets
from remote_server.client.shm.lease import LeaseWindow
from remote_server.client.transfer.get import GetState, GetTransfer
from remote_server.client.transfer.get_channel import GetChannel
from remote_server.client.transfer.put import PutState, PutTransfer
from remote_server.errors import DeadlineExceeded, RequestRefused, ServerUnavailable
from remote_server.protocol import (
    MAGIC,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    Get,
    Put,
    PutOutcome,
    Release,
    Touched,
)

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures", "shared_fixtures"]


@pytest.fixture
def io_thread(any_connections: IoThread | None) -> IoThread | None:
    return any_connections


MiB = 1 << 20


@dataclass
class World:
    """A client with windows of one block, its server, and the transfers that it made."""

    transport: str
    fake: FakeServer
    clock: Clock
    client: RemoteClient
    transfers: list[Any]
    rows: list[memoryview] = field(default_factory=list)
    ended: list[Future[Any]] = field(default_factory=list)

    @property
    def messages(self) -> tuple[type, type]:
        """The messages of a put and of a get."""
        return (SharedPut, SharedGet) if self.transport == "shm" else (Put, Get)

    def put(
        self, numbers: range, length: int = BLOCK_BYTES, timeout_s: float = 60.0
    ) -> Future[Any]:
        self.rows += (rows := rows_of(numbers, length))
        keys = [key(number) for number in numbers]
        return self._watched(self.client.put(NAMESPACE, keys, rows, timeout_s=timeout_s))

    def get(self, numbers: range, stall_s: float = 600.0, worth_s: float = 0.0) -> Future[Any]:
        self.rows += (rows := empty_rows(len(numbers)))
        keys = [key(number) for number in numbers]
        limits = {"stall_s": stall_s, "timeout_s": 60, "worth_s": worth_s}
        return self._watched(self.client.get(NAMESPACE, keys, rows, **limits))

    def _watched(self, future: Future[Any]) -> Future[Any]:
        future.add_done_callback(self.ended.append)
        return future

    def wait_until(self, state: PutState | GetState) -> Any:
        """The last transfer, once it is in `state`."""
        transfer = self.transfers[-1]
        eventually(lambda: transfer.state is state, f"{state}, not {transfer.state}")
        return transfer

    # ── the ends ─────────────────────────────────────────────────────────────────────────

    def end_by(self, name: str) -> None:
        getattr(self, name)()

    def deadline(self) -> None:
        self.clock.advance(60.1)

    def cancel(self) -> None:
        assert self.client.cancel_all(PATIENCE_S)

    def close(self) -> None:
        self.client.close(PATIENCE_S)

    def restart(self) -> None:
        self.fake.epoch = "epoch-2"
        self.client.stats(timeout_s=60)

    def loss(self) -> None:
        self.fake.close()

    def cut(self) -> None:
        """The channel's connection alone ends: ZeroMQ refuses a frame of this size."""
        kinds = self.messages
        eventually(lambda: any(kind_of(one.message) in kinds for one in self.fake.asked), "it came")
        asked = [one for one in self.fake.asked if kind_of(one.message) in kinds][-1]
        in_frames = kind_of(asked.message) is Get and self.transport == "tcp"
        most = MAX_FRAME_BYTES if in_frames else MAX_HEADER_BYTES
        self.fake.do(lambda: self.fake.send_raw(asked, MAGIC, bytes(most + 1)))

    # ── afterwards ───────────────────────────────────────────────────────────────────────

    def assert_nothing_is_left(self, after: str = "") -> None:
        assert len(self.ended) == len(set(self.ended)) == len(self.transfers)
        closed = self.client.closed
        if not closed:
            self.client.check()
        if after in ("deadline", "cancel"):
            self.clock.advance(1.1)  # blocks may still come; then the window is taken back
        channels = self.client._loop.channels
        eventually(lambda: all(is_idle(one, closed=closed) for one in channels), "all are idle")
        assert self.client.queued_bytes == 0
        if not closed:
            self.client.check()
        eventually(lambda: are_free(self.rows), "the rows are the caller's again")

    def assert_works(self) -> None:
        """What is put comes back, over the same transport."""
        self.fake.behave()
        eventually(self._is_ready, "the client is ready")
        if self.transport == "lanes":
            wait_for_lanes(self.client, self.clock)
        # An answer to something old may still end what comes now: begin with a clean slate.
        self.transfers.clear()
        self.ended.clear()
        assert self.put(range(50, 52)).result(PATIENCE_S).error is None
        got = self.get(range(50, 52)).result(PATIENCE_S)
        assert got.outcomes == [GetOutcome.HIT] * 2
        assert [bytes(row) for row in self.rows[-2:]] == [bytes(block(n)) for n in (50, 51)]
        assert kind_of(self.fake.asked[-1].message) in (self.messages[1], Release)
        assert self.client.transport == ("shm" if self.transport == "shm" else "tcp")
        if self.transport == "lanes":
            assert self.fake.all_asked(Put)[-1].message.lane
            assert self.fake.all_asked(Get)[-1].message.lane

    def _is_ready(self) -> bool:
        if not self.client.ready:
            self.clock.advance(0.1)
        return self.client.ready


def is_idle(channel: Channel, *, closed: bool) -> bool:
    """Nothing is registered there, held or expected. A closed channel expects nothing any more."""
    waits = channel.num_waiting or channel.queued_bytes or channel.releasing
    expects = isinstance(channel, GetChannel) and channel.has_leftovers and not closed
    return not (waits or expects or channel.has_more or channel.can_step)


def are_free(rows: list[memoryview]) -> bool:
    """Nothing else holds a view of the memory of `rows`, as far as the interpreter can see."""
    try:
        for row in rows:
            if isinstance(row.obj, bytearray) and row.nbytes == len(row.obj):
                memory = row.obj
                row.release()
                memory.append(0)
    except BufferError:
        return False
    except ValueError:  # released in an earlier attempt
        return True
    return True


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def recording(kind: type) -> Callable[..., Any]:
        def make(*values: Any, **fields: Any) -> Any:
            made.append(kind(*values, **fields))
            return made[-1]

        return make

    monkeypatch.setattr(remote_client, "PutTransfer", recording(PutTransfer))
    monkeypatch.setattr(remote_client, "GetTransfer", recording(GetTransfer))
    return made


@pytest.fixture
def world(
    transport: str, make_client: Callable[..., RemoteClient], clock: Clock, transfers: list[Any]
) -> Iterator[World]:
    with FakeServer(near=transport == "shm") as fake:
        client = make_client(
            fake.endpoint, clock=clock, get_window_bytes=BLOCK_BYTES, put_window_bytes=BLOCK_BYTES,
            shared_window_bytes=BLOCK_BYTES, lane_window_bytes=BLOCK_BYTES, batch_bytes=BLOCK_BYTES,
        )  # fmt: skip
        transfers.clear()
        yield World(transport, fake, clock, client, transfers)
        client.close()


# ── a put ────────────────────────────────────────────────────────────────────────────────


def submitted_put(world: World) -> Future[Any]:
    return world.put(range(2))


def prepared_put(world: World, before_s: float = 60.0) -> Future[Any]:
    """Behind one that ends after `before_s`."""
    world.fake.silence(world.messages[0])
    world.put(range(10, 11), timeout_s=before_s)
    world.wait_until(PutState.SENT)
    future = world.put(range(2))
    world.wait_until(PutState.PREPARED)
    return future


def sent_put(world: World) -> Future[Any]:
    world.fake.silence(world.messages[0])
    future = world.put(range(2))
    world.wait_until(PutState.SENT)
    world.fake.wait_for(world.messages[0])
    return future


ENDS = {
    "deadline": DeadlineExceeded, "cancel": DeadlineExceeded, "close": ServerUnavailable,
    "restart": ServerUnavailable, "loss": ServerUnavailable, "cut": ServerUnavailable,
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("begin", [prepared_put, sent_put])
def test_a_put_in_any_state_ends_once_however_it_ends(world: World, begin, end: str):
    future = begin(world)
    transfer = world.transfers[-1]
    world.end_by(end)
    put = future.result(PATIENCE_S)
    assert isinstance(put.error, ENDS[end])
    assert put.outcomes == [None] * 2
    assert transfer.state is PutState.FAILED
    world.assert_nothing_is_left(end)
    if end not in ("close", "loss"):
        world.assert_works()


def test_a_put_that_never_left_ends_at_its_deadline_without_a_new_connection(world: World):
    future = prepared_put(world, before_s=600.0)
    (before, _), kind = world.transfers, world.messages[0]
    world.fake.wait_for(kind)
    turn(world.client)
    world.clock.advance(60.1)
    put = future.result(PATIENCE_S)
    assert isinstance(put.error, DeadlineExceeded)
    assert put.bytes_sent == 0
    assert before.state is PutState.SENT
    assert world.client.counters()["put_resets"] == 0
    assert world.client.queued_bytes == BLOCK_BYTES


@pytest.mark.parametrize("integrity", [True, False])
def test_puts_carry_checksums_unless_integrity_is_off(world: World, make_client, integrity: bool):
    fake, keys, trailers = world.fake, [key(0), key(1)], []
    if fake.lanes is not None:
        fake.lanes.note = trailers.append
    client = make_client(fake.endpoint, integrity=integrity)
    assert client.put(NAMESPACE, keys, rows_of(range(2))).result(PATIENCE_S).created == 2
    (asked,) = fake.all_asked(world.messages[0])
    shared, rows = asked.message.shared, [block(0), block(1)]
    pages = [row[: protocol.PAGE_BYTES] for row in rows]
    sums = protocol.checksums(NAMESPACE, keys, pages if shared else rows) if integrity else []
    if world.transport == "lanes":
        assert (asked.message.checked, asked.message.checksums) == (integrity, [])
        assert trailers == (sums or [0, 0]), "behind the blocks"
        return
    assert (shared.pages if shared else asked.message.checksums) == sums
    assert not (shared and asked.message.checksums)


def test_an_answer_to_a_put_that_does_not_fit_counts_as_none(world: World):
    fake, kind = world.fake, world.messages[0]

    def answer(asked: Asked) -> None:
        stored = fake.stored(asked, [PutOutcome.CREATED] * len(asked.message.keys))
        fake.send(asked, replace(stored, outcomes=b""))
        fake.send(asked, replace(stored, outcomes=b"\x63" * stored.total))
        fake.send(asked, replace(stored, created=-1))
        fake.send(asked, Touched(request_id=stored.request_id, epoch=fake.epoch, touched=1))
        fake.send(asked, stored, b"payload")
        fake.send(asked, stored)

    fake.rules[kind] = answer
    assert world.put(range(2)).result(PATIENCE_S).created == 2
    assert world.client.counters()["protocol_errors"] == 5 * len(fake.all_asked(kind))


def test_a_put_ends_once_with_each_outcome(world: World):
    def answer(asked: Asked) -> None:
        stored = world.fake.stored(asked, [outcome] * len(asked.message.keys))
        world.fake.send(asked, stored)
        world.fake.send(asked, stored)  # a second answer changes nothing

    world.fake.rules[world.messages[0]] = answer
    for outcome in PutOutcome:
        put = world.put(range(3)).result(PATIENCE_S)
        assert put.outcomes == [outcome] * 3
        assert (put.error, put.total) == (None, 3)
        world.wait_until(PutState.ANSWERED)
    world.assert_nothing_is_left()
    world.assert_works()


# ── a get ────────────────────────────────────────────────────────────────────────────────


def submitted_get(world: World) -> Future[Any]:
    return world.get(range(2))


def prepared_get(world: World) -> Future[Any]:
    world.fake.silence(world.messages[1])
    world.get(range(10, 11))
    world.wait_until(GetState.REQUESTED)
    future = world.get(range(2))
    world.wait_until(GetState.PREPARED)
    return future


def requested_get(world: World, stall_s: float = 600.0) -> Future[Any]:
    hold_blocks(world.fake, range(2))
    world.fake.silence(world.messages[1])
    future = world.get(range(2), stall_s)
    world.wait_until(GetState.REQUESTED)
    world.fake.wait_for(world.messages[1])
    return future


def streaming_get(world: World) -> Future[Any]:
    """The first of its two blocks has come."""
    fake = world.fake
    hold_blocks(fake, range(2))

    def first_block(asked: Asked) -> None:
        if kind_of(asked.message) is Get and len(asked.message.keys) == 2:
            fake.send(asked, fake.summary_for(asked))
            fake.send(asked, *fake.blocks_for(asked, [0], more=True))
        elif asked.message.keys == [key(0)]:
            fake.answer(asked)

    fake.rules[world.messages[1]] = first_block
    future = world.get(range(2))
    transfer = world.wait_until(GetState.STREAMING)
    eventually(lambda: transfer.num_open == 1)
    return future


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("begin", [prepared_get, requested_get, streaming_get])
def test_a_get_in_any_state_ends_once_however_it_ends(world: World, begin, end: str):
    future = begin(world)
    transfer, rows = world.transfers[-1], world.rows[-2:]
    world.end_by(end)
    got = future.result(PATIENCE_S)
    assert isinstance(got.error, ENDS[end])
    late = GetOutcome.LATE if end in ("deadline", "cancel") else GetOutcome.UNAVAILABLE
    landed = [0] if begin is streaming_get else []
    assert got.landed == landed
    assert got.outcomes == [GetOutcome.HIT, late] if landed else [late, late]
    assert transfer.state is GetState.FAILED
    assert_untouched(rows, tuple(landed))
    world.assert_nothing_is_left(end)
    if end not in ("close", "loss"):
        world.assert_works()


def test_a_get_ends_when_nothing_comes_for_its_stall_time(world: World):
    future = requested_get(world, stall_s=0.050)
    turn(world.client)
    world.clock.advance(0.049)
    turn(world.client)
    assert not future.done()
    world.clock.advance(0.002)
    got = future.result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.LATE] * 2
    assert isinstance(got.error, DeadlineExceeded)
    assert world.client.counters()["timeouts_get"] == 1
    assert_untouched(world.rows)


def pause(world: World, seconds: float, future: Future[Any]) -> None:
    """Time passes, until `future` ends."""
    for _ in range(round(seconds / 0.05)):
        if not future.done():
            world.clock.advance(0.05)
            turn(world.client)


def paced_get(world: World, pauses_s: list[float], stall_s: float = 2.0) -> Any:
    """The result of a get of ten blocks that are worth a second each. Before each one the server
    pauses so long; the last pause has no end."""
    hold_blocks(world.fake, range(10))
    asked: list[Asked] = []
    world.fake.rules[world.messages[1]] = asked.append
    future = world.get(range(10), stall_s, worth_s=10.0)
    for number, pause_s in enumerate(pauses_s, start=1):
        eventually(lambda number=number: len(asked) == number or future.done())
        if future.done():
            break
        pause(world, pause_s, future)
        if not future.done():
            world.fake.do(lambda: world.fake.answer(asked[-1]))
            eventually(lambda number=number: world.transfers[-1].num_open == 10 - number)
    pause(world, stall_s + 0.1, future)
    return future.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("pauses_s", "landed"),
    [
        ([0.95] * 10, 10),  # comes sooner than it is worth, in all 9.5 s
        ([0.5] * 5 + [1.9] + [0.5] * 4, 10),  # one pause that is shorter than its patience
        ([1.4] * 10, 2),  # comes too slowly: 0.8 s behind after two, 2 s within the third
        ([0.05] * 5, 5),  # a fast beginning buys no patience for a silence
    ],
)
def test_a_get_goes_on_as_long_as_its_blocks_come_at_a_pace_that_pays(
    world: World, pauses_s: list[float], landed: int
):
    began_s = world.clock.now
    got = paced_get(world, pauses_s)
    assert got.landed == [*range(landed)], "what has landed is used"
    assert (got.error is None) == (landed == 10)
    if landed < 10:
        assert isinstance(got.error, DeadlineExceeded)
        assert got.outcomes[-1] is (GetOutcome.SLOW if landed == 2 else GetOutcome.LATE)
        late_s = world.clock.now - began_s - landed
        assert late_s <= 2.06, "computed from the start, and its patience"
    world.fake.behave()


def test_a_get_ends_once_with_hits_and_misses(world: World):
    hold_blocks(world.fake, range(2))
    got = world.get(range(3)).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.HIT, GetOutcome.HIT, GetOutcome.MISS]
    assert [bytes(row) for row in world.rows[:2]] == [bytes(block(n)) for n in range(2)]
    world.wait_until(GetState.LANDED)
    world.assert_nothing_is_left()
    world.assert_works()


def test_a_refused_transfer_ends_once(world: World):
    for message in world.messages:
        world.fake.rules[message] = world.fake.refuse("too_large")
    put = world.put(range(3)).result(PATIENCE_S)
    assert isinstance(put.error, RequestRefused) and put.error.code == "too_large"
    world.wait_until(PutState.FAILED)
    got = world.get(range(3)).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.REFUSED] * 3
    assert isinstance(got.error, RequestRefused)
    world.wait_until(GetState.FAILED)
    world.assert_nothing_is_left()
    world.assert_works()


def test_a_reply_after_the_end_of_a_get_writes_nothing_and_is_released(world: World):
    future = requested_get(world)
    (asked,) = world.fake.wait_for(world.messages[1])
    world.cancel()
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.LATE] * 2
    world.fake.do(lambda: world.fake.answer(asked))
    eventually(lambda: world.client.counters()["late_replies"], "the reply has come")
    assert_untouched(world.rows)
    if world.transport == "shm":
        eventually(lambda: world.client.counters()["released_leases"] == 1, "its lease is over")
        (released,) = world.fake.wait_for(Release)
        assert released.message.lease == asked.message.request_id + 10**6
    world.assert_nothing_is_left()
    world.assert_works()


@pytest.mark.parametrize("end", ["deadline", "cancel"])
@pytest.mark.parametrize("transport", ["shm"], indirect=True)
def test_a_get_that_ends_amid_its_lease_releases_it(world: World, points, monkeypatch, end: str):
    monkeypatch.setattr("remote_server.client.shm.lease.GROUP_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(shm_gets, "TURN_BYTES", BLOCK_BYTES)
    hold_blocks(world.fake, range(3))
    monkeypatch.setattr(LeaseWindow, "next_bytes", 3 * BLOCK_BYTES)
    with points.held_at(Point.BEFORE_COPY, skip=1) as held:
        future = world.get(range(3))
        held.wait()
        world.clock.advance(60.1) if end == "deadline" else world.client.cancel_all(0)
    got = future.result(PATIENCE_S)
    assert got.outcomes[-1] is GetOutcome.LATE
    assert_untouched(world.rows, tuple(got.landed))
    eventually(lambda: world.client.counters()["released_leases"] == 1)
    world.assert_nothing_is_left(end)
    world.assert_works()


# ── before a channel, and after the last reply ───────────────────────────────────────────


@pytest.mark.parametrize("end", ["cancel_all", "close"])
@pytest.mark.parametrize("begin", [submitted_put, submitted_get])
@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
def test_a_transfer_that_no_channel_has_yet_ends_once(world: World, begin, end: str):
    with io_thread_held(world.client, world.fake):
        future = begin(world)
        assert world.transfers[-1].state in (PutState.SUBMITTED, GetState.SUBMITTED)
        getattr(world.client, end)(0)
    error = future.result(PATIENCE_S).error
    assert isinstance(error, DeadlineExceeded if end == "cancel_all" else ServerUnavailable)
    if end == "close":
        eventually(lambda: world.client.closed)
    world.assert_nothing_is_left("cancel" if end == "cancel_all" else end)


@pytest.mark.parametrize("end", ["deadline", "cancel", "close", "loss", "release"])
@pytest.mark.parametrize("transport", ["tcp"])  # over shared memory nothing else holds rows
def test_a_put_with_all_replies_ends_once_its_rows_are_released(
    make_client, clock: Clock, transfers, transport: str, end: str
):
    with FakeServer() as fake:
        client = make_client(
            fake.endpoint, clock=clock, block_bytes=MiB, batch_bytes=4 * MiB,
            put_window_bytes=32 * MiB,
        )  # fmt: skip
        world = World(transport, fake, clock, client, transfers)
        world.put(range(1), MiB).result(PATIENCE_S)
        (first,) = fake.all_asked(Put)
        fake.stop_reading()
        future = world.put(range(24), MiB)
        eventually(lambda: client.counters()["blocks_out"] == 25)
        for number in range(1, 7):
            stored = fake.stored(first, [PutOutcome.CREATED] * 4)
            stored = replace(stored, request_id=stored.request_id + number)
            fake.do(partial(fake.send, first, stored))
        transfer = world.wait_until(PutState.RELEASING)
        assert not future.done()
        fake.read_again() if end == "release" else world.end_by(end)
        put = future.result(PATIENCE_S)
        assert (put.error, put.created) == (None, 24), "all its replies had come"
        assert transfer.state is PutState.ANSWERED
        world.assert_nothing_is_left()
        client.close()


# ── another channel ──────────────────────────────────────────────────────────────────────


def test_a_transport_is_one_entry_in_the_list(
    fake: FakeServer, make_client, monkeypatch: pytest.MonkeyPatch, breaks_inside
):
    monkeypatch.setattr(loop, "TRANSPORTS", (*loop.TRANSPORTS, open_channels))
    client = make_client(fake.endpoint)
    (counting,) = [one for one in client._loop.channels if isinstance(one, CountingChannel)]
    keys = [key(number) for number in range(3)]
    assert client.put(COUNTED, keys, rows_of(range(3))).result(PATIENCE_S).error is None
    got = client.get(COUNTED, keys, empty_rows(3)).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.MISS] * 3
    assert (counting.blocks_put, counting.blocks_got) == (3, 3)
    assert not fake.all_asked(Put), "it moves nothing"

    assert client.put(NAMESPACE, keys, rows_of(range(3))).result(PATIENCE_S).created == 3
    assert client.cancel_all(PATIENCE_S)
    assert counting.calls == ["end_all"]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(CountingChannel, "wakes", fail)
        wake(client)
        eventually(lambda: "reset" in counting.calls, "the loop begins again")
    eventually(lambda: client.ready)
    client.close()
    assert counting.calls[-2:] == ["end_all", "close"]
