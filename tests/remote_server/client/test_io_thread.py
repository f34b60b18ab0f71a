"""An I/O thread that clients share: each has its turns, and what befalls one disturbs no other."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import pairwise

import pytest
import zmq
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    Clock,
    assert_works,
    empty_rows,
    io_threads,
    key,
    rows_of,
    turn,
)
from fake_server import PATIENCE_S, FakeServer, eventually

from remote_server.client import BreakerState, ClientConfig, GetOutcome, IoThread, RemoteClient
from remote_server.client.connection.poll_set import PollSet
from remote_server.client.transfer.put import PutTransfer
from remote_server.errors import ConfigError, DeadlineExceeded, ServerUnavailable
from remote_server.protocol import Lookup, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


@pytest.fixture
def io_thread() -> Iterator[IoThread]:
    io = IoThread()
    yield io
    io.close(PATIENCE_S)


@pytest.fixture
def other() -> Iterator[FakeServer]:
    with FakeServer() as other:
        yield other


# ── turns ────────────────────────────────────────────────────────────────────────────────


class Turns:
    """A loop that only counts its turns: `wait_s` apart, or when it is woken."""

    def __init__(self, wait_s: float = 3600.0) -> None:
        self.poll_set = PollSet()
        self.wait_s = wait_s
        self.num_turns = 0
        self.readable: dict[object, int] = {}
        self.ended = False
        self.causes: list[BaseException] = []
        self.failure: BaseException | None = None
        self.on_turn: Callable[[], None] = lambda: None
        self._stopping = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        # `stop` may ring it after the last turn, and so may others.
        weakref.finalize(self, os.close, self._bell)
        self.poll_set.register(self._bell)

    def turn(self, readable: dict[object, int]) -> float:
        self.num_turns += 1
        self.readable = readable
        if self._bell in readable:
            os.eventfd_read(self._bell)
        if self._stopping:
            self.poll_set.close()
            self.ended = True
        self.on_turn()
        if self.failure is not None:
            raise self.failure
        return self.wait_s

    def recover(self, cause: BaseException) -> None:
        self.causes.append(cause)

    def wake(self) -> None:
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        self._stopping = True
        self.wake()


def begin(io: IoThread, *loops: Turns) -> None:
    for loop in loops:
        io.add(lambda loop=loop: loop)
    for loop in loops:
        eventually(lambda loop=loop: loop.num_turns)


@pytest.mark.parametrize("others", [0, 100])
def test_an_idle_loop_has_no_turn_while_another_has_many(io_thread: IoThread, others: int):
    idle = [Turns() for _ in range(others)]
    begin(io_thread, *idle)
    busy = Turns(wait_s=0.0)
    begin(io_thread, busy)
    begun = busy.num_turns
    eventually(lambda: busy.num_turns > begun + 5, "the others have had the turn of its beginning")
    before = [loop.num_turns for loop in idle]
    eventually(lambda: busy.num_turns > begun + 200)
    assert [loop.num_turns for loop in idle] == before


def test_a_loop_that_always_has_more_to_do_gives_each_other_one_a_turn(io_thread: IoThread):
    busy, woken = Turns(wait_s=0.0), Turns()
    begin(io_thread, busy, woken)
    seen: list[int] = []

    def wake_and_note() -> None:
        woken.wake()
        seen.append(woken.num_turns)

    busy.on_turn = wake_and_note
    eventually(lambda: len(seen) > 110)
    assert all(later - earlier == 1 for earlier, later in pairwise(seen[10:]))


def test_a_message_whose_signal_a_turn_took_back_is_received_in_the_next_turn(io_thread: IoThread):
    """Any call to a socket of libzmq may do so. Nothing else would wake the loop."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as near,
        context.socket(zmq.PAIR) as far,
    ):
        near.bind("inproc://near")
        far.connect("inproc://near")
        loop, came = Turns(), threading.Event()
        loop.poll_set.register(near)

        def take_a_turn() -> None:
            if near in loop.readable:
                assert near.recv(zmq.NOBLOCK) == b"a message"
                came.set()
            elif not loop.ended:
                far.send(b"a message")  # it comes after the poll of this turn
                assert near.getsockopt(zmq.EVENTS) & zmq.POLLIN

        begin(io_thread, loop, Turns(wait_s=3600.0))
        loop.on_turn = take_a_turn
        loop.wake()
        assert came.wait(PATIENCE_S)
        io_thread.close(PATIENCE_S)


@pytest.mark.parametrize("others", [0, 1])
def test_a_loop_has_its_turn_when_it_is_due(io_thread: IoThread, others: int):
    begin(io_thread, *(Turns() for _ in range(others)))
    loop = Turns(wait_s=0.01)
    begin(io_thread, loop)
    eventually(lambda: loop.num_turns > 5, "nothing wakes it")


def test_a_loop_that_fails_recovers_and_has_a_pause_in_which_the_others_go_on(io_thread: IoThread):
    failing, busy = Turns(), Turns(wait_s=0.0)
    begin(io_thread, failing, busy)
    failing.failure = SystemExit("a bug")
    failing.wake()
    eventually(lambda: failing.causes)
    turns: list[int] = []
    failing.on_turn = lambda: turns.append(busy.num_turns)
    failing.wake()  # it takes effect after the pause only
    eventually(lambda: len(turns) >= 3)
    assert all(later > earlier + 10 for earlier, later in pairwise(turns))
    failing.failure = None
    eventually(lambda: failing.num_turns > 4)


# ── clients ──────────────────────────────────────────────────────────────────────────────


def test_all_clients_have_one_thread_and_a_client_that_leaves_ends_none(
    io_thread: IoThread, make_client, fake: FakeServer, other: FakeServer
):
    before = io_threads()
    clients = [make_client(server.endpoint) for server in (fake, other) for _ in range(5)]
    assert io_threads() == before
    for client in clients[:5]:
        client.close(PATIENCE_S)
        assert client.closed
    for client in clients[5:]:
        assert_works(client, other)
    assert_works(make_client(fake.endpoint), fake)


def test_close_waits_for_rows_that_libzmq_holds_and_the_others_go_on(
    make_client, fake: FakeServer, other: FakeServer, monkeypatch
):
    """When libzmq lets go of them is simulated: in fact within a millisecond."""
    leaving, staying = make_client(fake.endpoint), make_client(other.endpoint)
    fake.silence(Put)
    put = leaving.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=60)
    fake.wait_for(Put)
    monkeypatch.setattr(PutTransfer, "is_released", lambda _: False)
    leaving.close(0.01)
    for _ in range(20):
        assert staying.lookup(NAMESPACE, [key(1)]).result(PATIENCE_S)
    assert not put.done()
    assert not leaving.closed
    late = leaving.lookup(NAMESPACE, [key(1)], timeout_s=60)
    monkeypatch.undo()
    leaving.close(PATIENCE_S)
    assert leaving.closed
    assert isinstance(put.result(0).error, ServerUnavailable)
    assert isinstance(late.exception(0), ServerUnavailable)


def test_a_callback_of_one_client_cannot_wait_for_another_on_the_same_thread(
    make_client, fake: FakeServer, other: FakeServer
):
    one, two = make_client(fake.endpoint), make_client(other.endpoint)
    cancelled: Future[bool] = Future()
    future = one.lookup(NAMESPACE, [key(1)])
    future.add_done_callback(lambda _: cancelled.set_result(two.cancel_all(PATIENCE_S)))
    assert cancelled.result(PATIENCE_S) is False


def test_a_client_that_is_dropped_leaves_the_thread_to_the_others(
    io_thread: IoThread, make_client, fake: FakeServer
):
    staying = make_client(fake.endpoint)
    ends = threading.Event()
    client = RemoteClient(ClientConfig(fake.endpoint), io=io_thread)
    loop = client._loop
    client.lookup("undeclared", []).add_done_callback(lambda _: ends.set())
    assert ends.wait(PATIENCE_S)
    del client
    assert loop.join(PATIENCE_S)
    assert_works(staying, fake)


def test_the_end_of_the_thread_ends_every_client(fake: FakeServer, other: FakeServer):
    io = IoThread()
    clients = [RemoteClient(ClientConfig(one.endpoint), io=io) for one in (fake, other)]
    fake.silence(Lookup)
    for client in clients:
        client.declare(NAMESPACE, BLOCK_BYTES)
    eventually(lambda: all(client.ready for client in clients))
    future = clients[0].lookup(NAMESPACE, [key(1)], timeout_s=60)
    fake.wait_for(Lookup)
    io.close(PATIENCE_S)
    assert isinstance(future.exception(0), ServerUnavailable)
    assert all(client.closed for client in clients)
    for client in clients:
        assert isinstance(client.stats().exception(0), ServerUnavailable)
        client.close()
    with pytest.raises(ConfigError, match="closed"):
        RemoteClient(ClientConfig(fake.endpoint), io=io)
    io.close()


# ── a server that stands still ───────────────────────────────────────────────────────────


def test_a_server_that_reads_nothing_delays_no_request_to_another(
    make_client, fake: FakeServer, other: FakeServer, clock: Clock
):
    still = make_client(fake.endpoint, clock=clock, hello_timeout_s=600.0)
    sound = make_client(other.endpoint)
    keys = [key(number) for number in range(8)]
    for client in (still, sound):
        assert client.put(NAMESPACE, keys, rows_of(range(8))).result(PATIENCE_S).created == 8
    fake.stop_reading()
    silent = still.get(NAMESPACE, keys, empty_rows(8), stall_s=60, timeout_s=600)
    lost = still.put(NAMESPACE, keys, rows_of(range(8)), force=True, timeout_s=60)
    for _ in range(20):
        for _ in range(4):
            still.lookup(NAMESPACE, keys, timeout_s=60)
        assert sound.lookup(NAMESPACE, keys).result(PATIENCE_S).prefix == 8
        got = sound.get(NAMESPACE, keys, empty_rows(8)).result(PATIENCE_S)
        assert got.outcomes == [GetOutcome.HIT] * 8
    assert not (silent.done() or lost.done())
    turn(still)
    clock.advance(60.1)
    assert silent.result(PATIENCE_S).outcomes == [GetOutcome.LATE] * 8
    assert isinstance(lost.result(PATIENCE_S).error, DeadlineExceeded)
    eventually(lambda: still.breaker is not BreakerState.CLOSED)
    assert sound.breaker is BreakerState.CLOSED
    counters = sound.counters()
    assert not any(number for name, number in counters.items() if "timeouts" in name)
    fake.read_again()

    def is_back() -> bool:
        clock.advance(0.05)  # the breaker's pause
        return still.ready

    eventually(is_back)
    assert still.lookup(NAMESPACE, keys).result(PATIENCE_S).prefix == 8
