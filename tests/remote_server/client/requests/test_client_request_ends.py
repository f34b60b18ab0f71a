"""Every request of the client ends exactly once: closed, cancelled, dropped, or broken inside."""

import gc
import threading
from concurrent.futures import wait

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_untouched,
    empty_rows,
    hold_blocks,
    io_threads,
    key,
    rows_of,
    wake,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually

from remote_server import protocol
from remote_server.client import ClientConfig, GetOutcome, IoThread, RemoteClient
from remote_server.client.requests.control import ControlChannel
from remote_server.client.zmq.get import ZmqGets
from remote_server.errors import (
    DeadlineExceeded,
    ServerUnavailable,
)  # fmt: skip
from remote_server.protocol import Get, Lookup, Put
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


@pytest.fixture
def io_thread(any_connections: IoThread | None) -> IoThread | None:
    return any_connections


HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


def _everything(client, keys, rows, sources):
    return [
        client.get(NAMESPACE, keys, rows, stall_s=60, timeout_s=60),
        client.put(NAMESPACE, keys, sources, timeout_s=60),
        client.lookup(NAMESPACE, keys, timeout_s=60),
        client.touch(NAMESPACE, keys, timeout_s=60),
        client.stats(timeout_s=60),
        client.clear(timeout_s=60),
    ]


def _silence_all(fake):
    kinds = (Get, Put, Lookup, protocol.Touch, protocol.Stats, protocol.Clear)
    fake.silence(*kinds)
    return kinds


@pytest.mark.parametrize(
    ("end", "outcome", "error"),
    [
        ("close", GetOutcome.UNAVAILABLE, ServerUnavailable),
        ("cancel_all", GetOutcome.LATE, DeadlineExceeded),
    ],
)
def test_every_request_ends_exactly_once_and_its_rows_are_free(client, fake, end, outcome, error):
    kinds = _silence_all(fake)
    keys = hold_blocks(fake, range(4))
    rows = empty_rows(4)
    futures = _everything(client, keys, rows, rows_of(range(4)))
    for kind in kinds:
        fake.wait_for(kind)
    ends = []
    for future in futures:
        future.add_done_callback(ends.append)
    getattr(client, end)(PATIENCE_S)
    assert sorted(map(id, ends)) == sorted(map(id, futures))
    got, put, *others = futures
    assert got.result(0).outcomes == [outcome] * 4
    assert isinstance(put.result(0).error, error)
    assert all(isinstance(future.exception(0), error) for future in others)
    if end == "close":
        return
    assert client.counters()["cancelled"] == 6
    (asked,) = fake.all_asked(Get)
    fake.do(lambda: fake.answer(asked))  # late: the rows have another owner by now
    eventually(lambda: client.counters()["late_replies"] >= 5)
    assert_untouched(rows)
    fake.behave()
    assert client.ready
    assert client.get(NAMESPACE, keys, rows).result(PATIENCE_S).landed == [0, 1, 2, 3]


def test_a_closed_client_answers_unavailable_at_once(client):
    client.close()
    client.close()
    assert not client.ready
    got, put, *others = _everything(client, [key(1)], empty_rows(1), rows_of(range(1)))
    assert got.result(0).outcomes == [GetOutcome.UNAVAILABLE]
    assert isinstance(put.result(0).error, ServerUnavailable)
    assert all(isinstance(future.exception(0), ServerUnavailable) for future in others)
    assert client.cancel_all(0.1)


def test_requests_racing_with_close_all_end(fake, make_client):
    client = make_client(fake.endpoint)
    keys = hold_blocks(fake, range(2))
    futures = []

    def ask():
        for _ in range(100):
            futures.append(client.get(NAMESPACE, keys, empty_rows(2)))
            futures.append(client.lookup(NAMESPACE, keys))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(futures) > 50)
    client.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wait(futures, PATIENCE_S).not_done


def test_close_from_a_callback_does_not_wait_for_itself(client, fake):
    future = client.lookup(NAMESPACE, [key(1)])
    closed = threading.Event()
    future.add_done_callback(lambda _: (client.close(), closed.set()))
    assert closed.wait(PATIENCE_S)
    client.close()


def test_cancel_all_waits_until_libzmq_lets_go_of_the_rows(fake, make_client):
    client = make_client(fake.endpoint, block_bytes=MiB)
    fake.stop_reading()
    rows = rows_of(range(24), MiB)
    future = client.put(NAMESPACE, [key(n) for n in range(24)], rows, timeout_s=60)
    eventually(lambda: client.counters()["bytes_out"] == 24 * MiB)
    assert client.cancel_all(PATIENCE_S)
    assert future.done()
    assert client.counters()["put_resets"] == 1


def test_a_future_cannot_be_cancelled_behind_the_clients_back(client, fake):
    fake.silence(Get)
    future = client.get(NAMESPACE, [key(1)], empty_rows(1))
    assert not future.cancel()
    assert client.cancel_all(PATIENCE_S)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.LATE]


@pytest.mark.parametrize("op", ["get", "put"])
def test_an_error_in_a_result_keeps_no_row_alive(op, make_client):
    """Its traceback would, until the garbage is collected: a pool could not be unmapped."""
    client = make_client("tcp://127.0.0.1:1", wait=False)
    memory = bytearray(BLOCK_BYTES)
    gc.disable()
    try:
        result = getattr(client, op)(NAMESPACE, [key(1)], [memoryview(memory)]).result(PATIENCE_S)
        assert isinstance(result.error, ServerUnavailable)
        eventually(lambda: not client.queued_bytes)
        memory.append(0)  # a BufferError while any view of it exists
    finally:
        gc.enable()


def test_a_client_that_is_dropped_ends_its_thread(fake):
    before = io_threads()
    client = RemoteClient(ClientConfig(fake.endpoint))
    (thread,) = io_threads() - before
    del client
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("place", "error"), [("receive", ZeroDivisionError), ("expire", SystemExit)]
)
def test_an_exception_inside_the_loop_ends_requests_and_not_the_thread(
    client, fake, monkeypatch, caplog, breaks_inside, place, error
):
    fake.silence(Get, Put)
    keys = [key(1)]
    futures = [
        client.get(NAMESPACE, keys, empty_rows(1), stall_s=60),
        client.put(NAMESPACE, keys, rows_of(range(1))),
    ]
    fake.wait_for(Get)
    fake.wait_for(Put)

    def fail(*_):
        raise error("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(ControlChannel, place, fail)
        wake(client)
        got, put = (future.result(PATIENCE_S) for future in futures)
    assert isinstance(got.error, ServerUnavailable)
    assert isinstance(put.error, ServerUnavailable)
    eventually(lambda: "a bug" in caplog.text)
    fake.behave()
    eventually(lambda: client.ready)
    assert client.put(NAMESPACE, keys, rows_of(range(1))).result(PATIENCE_S).created == 1
    assert client.counters()["internal_errors"] >= 1


def test_a_request_that_breaks_the_loop_ends_too(client, fake, monkeypatch, breaks_inside):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(ZmqGets, "offer", fail)
    got = client.get(NAMESPACE, [key(1)], empty_rows(1)).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.UNAVAILABLE]
    monkeypatch.undo()
    eventually(lambda: client.counters()["internal_errors"] == 1)
    eventually(lambda: client.ready)
