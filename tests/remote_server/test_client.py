"""The client's everyday life: what goes out comes back, within its limits, and it ends cleanly."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    key,
    rows_of,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually

from remote_server import protocol
from remote_server.client import ClientConfig, GetOutcome, RemoteClient
from remote_server.config import MiB, ServerConfig
from remote_server.errors import (
    ConfigError,
    DeadlineExceeded,
    LocalProtocolError,
    RequestRefused,
    ServerUnavailable,
)  # fmt: skip
from remote_server.protocol import Declined, Get, KeyState, Lookup, Put, PutOutcome, Stored
from remote_server.server import Server

pytest_plugins = ["client_fixtures"]

HIT, MISS = GetOutcome.HIT, GetOutcome.MISS


@pytest.fixture
def real(transport, make_client):
    """A client of a real server with 64 MiB, over either transport."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=64 * MiB, populate=False)
    with Server(config) as server:
        client = make_client(server.endpoint, block_bytes=MiB)
        yield client
        assert client.transport == transport
        counters = client.counters()
        over_shm = counters["shm_bytes_in"], counters["shm_bytes_out"]
        over_all = counters["bytes_in"], counters["bytes_out"]
        assert over_shm == (over_all if transport == "shm" else (0, 0))
    server.store.check()
    bad = {k: v for k, v in server.store.counters.items() if k.startswith("bad_messages") and v}
    assert not bad


# ── against a real server ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("length", [1, 1000, 64 << 10, MiB])
def test_a_block_comes_back_as_it_went(real, length):
    keys = [key(number) for number in range(20)]
    put = real.put(NAMESPACE, keys, rows_of(range(20), length), deferred=False).result(PATIENCE_S)
    assert (put.total, put.created, put.error) == (20, 20, None)
    assert put.outcomes == [PutOutcome.CREATED] * 20
    assert put.bytes_sent == 20 * length

    found = real.lookup(NAMESPACE, [*keys, key(99)], timeout_s=1).result(PATIENCE_S)
    assert found.prefix == 20
    assert found.states == bytes([KeyState.READABLE] * 20 + [KeyState.ABSENT])

    rows = empty_rows(21, length)
    got = real.get(NAMESPACE, [*keys, key(99)], rows, stall_s=1).result(PATIENCE_S)
    assert got.outcomes == [HIT] * 20 + [MISS]
    assert got.landed == list(range(20))
    assert (got.bytes, got.error) == (20 * length, None)
    for number in range(20):
        assert rows[number] == block(number, length)
    assert_untouched(rows, but=tuple(range(20)))


def test_2000_small_blocks_fit_through_a_window_of_16(transport, make_client):
    with Server(ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)) as server:
        client = make_client(
            server.endpoint, get_window_bytes=16 * BLOCK_BYTES, put_window_bytes=16 * BLOCK_BYTES,
            batch_bytes=4 * BLOCK_BYTES,
        )  # fmt: skip
        keys = [key(number) for number in range(2000)]
        put = client.put(NAMESPACE, keys, rows_of(range(2000)), deferred=False).result(PATIENCE_S)
        assert put.created == 2000
        rows = empty_rows(2000)
        got = client.get(NAMESPACE, keys, rows, stall_s=1).result(PATIENCE_S)
        assert got.landed == list(range(2000))
        assert all(row == block(number) for number, row in enumerate(rows))


def test_what_exists_is_not_created_again_unless_forced(real):
    keys, rows = [key(1), key(2)], rows_of(range(1, 3))
    assert real.put(NAMESPACE, keys, rows, deferred=False).result(PATIENCE_S).created == 2
    assert real.put(NAMESPACE, keys, rows, deferred=False).result(PATIENCE_S).existed == 2
    forced = real.put(NAMESPACE, keys, rows, deferred=False, force=True).result(PATIENCE_S)
    assert forced.outcomes == [PutOutcome.FORCED] * 2


def test_a_key_twice_in_one_get_fills_both_rows(real):
    real.put(NAMESPACE, [key(1)], rows_of(range(1, 2)), deferred=False).result(PATIENCE_S)
    rows = empty_rows(3)
    got = real.get(NAMESPACE, [key(1), key(7), key(1)], rows, stall_s=1).result(PATIENCE_S)
    assert got.outcomes == [HIT, MISS, HIT]
    assert rows[0] == rows[2] == block(1)


def test_touch_stats_and_clear_reach_the_server(real):
    real.put(NAMESPACE, [key(1)], rows_of(range(1, 2)), deferred=False).result(PATIENCE_S)
    assert real.touch(NAMESPACE, [key(1), key(2)]).result(PATIENCE_S) == 1
    stats = real.stats().result(PATIENCE_S)
    assert stats.namespaces[NAMESPACE].blocks == 1
    assert stats.epoch == real.epoch
    assert real.clear(NAMESPACE).result(PATIENCE_S).removed == 1
    assert real.clear().result(PATIENCE_S).removed == 0


def test_many_threads_share_one_client(real):
    failures = []

    def use(first):
        numbers = range(first, first + 6)
        keys = [key(number) for number in numbers]
        rows = empty_rows(6)
        real.put(NAMESPACE, keys, rows_of(numbers), deferred=False).result(PATIENCE_S)
        got = real.get(NAMESPACE, keys, rows, stall_s=1).result(PATIENCE_S)
        if got.landed != list(range(6)) or [*map(bytes, rows)] != [*map(block, numbers)]:
            failures.append(first)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(0, 48, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures


# ── limits ───────────────────────────────────────────────────────────────────────────────


def test_gets_never_exceed_their_window(fake, make_client):
    client = make_client(
        fake.endpoint, get_window_bytes=8 * BLOCK_BYTES, batch_bytes=2 * BLOCK_BYTES
    )
    keys = hold_blocks(fake, range(60))
    waiting = []
    fake.rules[Get] = waiting.append
    rows = empty_rows(60)
    futures = [
        client.get(NAMESPACE, keys[i : i + 20], rows[i : i + 20], stall_s=5) for i in (0, 20, 40)
    ]
    for answered in range(0, 30, 4):
        eventually(lambda n=answered: len(fake.all_asked(Get)) == min(n + 4, 30), "window used")
        assert sum(len(asked.message.keys) for asked in waiting) <= 8
        batch, waiting[:] = list(waiting), []
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    for future in futures:
        assert future.result(PATIENCE_S).landed == list(range(20))
    assert all(len(asked.message.keys) == 2 for asked in fake.all_asked(Get))


def test_gets_in_flight_are_bounded_in_blocks_too(fake, make_client):
    client = make_client(fake.endpoint, get_window_blocks=8)
    keys = hold_blocks(fake, range(40))
    fake.silence(Get)
    future = client.get(NAMESPACE, keys, empty_rows(40), stall_s=0.2)
    fake.wait_for(Get, 4)
    assert future.result(PATIENCE_S).outcomes == [GetOutcome.LATE] * 40
    assert sum(len(asked.message.keys) for asked in fake.all_asked(Get)) == 8


def test_puts_never_exceed_their_window(fake, make_client):
    client = make_client(
        fake.endpoint, put_window_bytes=4 * BLOCK_BYTES, batch_bytes=2 * BLOCK_BYTES
    )
    waiting = []
    fake.rules[Put] = waiting.append
    keys = [key(number) for number in range(20)]
    future = client.put(NAMESPACE, keys, rows_of(range(20)))
    for answered in range(0, 10, 2):
        eventually(lambda n=answered: len(fake.all_asked(Put)) == n + 2, "window used")
        batch, waiting[:] = list(waiting), []
        assert sum(sum(asked.message.lengths) for asked in batch) <= 4 * BLOCK_BYTES
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    assert future.result(PATIENCE_S).created == 20


def test_a_block_larger_than_the_window_still_travels(fake, make_client):
    client = make_client(fake.endpoint, get_window_bytes=100, put_window_bytes=100, batch_bytes=100)
    keys = [key(1), key(2)]
    assert client.put(NAMESPACE, keys, rows_of(range(1, 3))).result(PATIENCE_S).created == 2
    rows = empty_rows(2)
    assert client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S).landed == [0, 1]
    assert len(fake.all_asked(Put)) == len(fake.all_asked(Get)) == 2


def test_the_servers_limit_on_keys_splits_every_request(fake, make_client):
    fake.max_keys = 3
    client = make_client(fake.endpoint)
    keys = hold_blocks(fake, range(8))
    del fake.blocks[NAMESPACE, keys[4]]
    found = client.lookup(NAMESPACE, keys, timeout_s=1).result(PATIENCE_S)
    assert found.prefix == 4
    assert [state == KeyState.READABLE for state in found.states] == [
        number != 4 for number in range(8)
    ]
    assert client.touch(NAMESPACE, keys).result(PATIENCE_S) == 8
    assert (
        client.get(NAMESPACE, keys, empty_rows(8), stall_s=5).result(PATIENCE_S).outcomes.count(HIT)
        == 7
    )
    assert client.put(NAMESPACE, keys, rows_of(range(8))).result(PATIENCE_S).total == 8
    asked = [asked.message for asked in fake.asked if hasattr(asked.message, "keys")]
    assert max(len(message.keys) for message in asked) == 3


def test_more_lookups_than_fit_on_the_wire_wait_their_turn(fake, make_client):
    client = make_client(fake.endpoint, max_control_in_flight=2)
    waiting = []
    fake.rules[Lookup] = waiting.append
    futures = [client.lookup(NAMESPACE, [key(n)], timeout_s=5) for n in range(6)]
    for answered in (0, 2, 4):
        eventually(lambda n=answered: len(fake.all_asked(Lookup)) == n + 2)
        batch, waiting[:] = list(waiting), []
        fake.do(lambda batch=batch: [fake.answer(asked) for asked in batch] and None)
    assert len([future.result(PATIENCE_S) for future in futures]) == 6


def test_small_blocks_share_frames(fake, make_client):
    client = make_client(fake.endpoint)
    fake.blocks_per_frame = 16
    keys = [key(number) for number in range(300)]
    assert client.put(NAMESPACE, keys, rows_of(range(300))).result(PATIENCE_S).created == 300
    (asked,) = fake.all_asked(Put)
    assert len(asked.payload) == 2
    rows = empty_rows(300)
    assert len(client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S).landed) == 300
    assert all(row == block(number) for number, row in enumerate(rows))


def test_rows_of_any_shape_and_type_are_bytes(client):
    np = pytest.importorskip("numpy")
    source = np.arange(1024, dtype=np.int32).reshape(4, 256)
    target = np.zeros_like(source)
    assert client.put(NAMESPACE, [key(1)], [memoryview(source)]).result(PATIENCE_S).created == 1
    assert client.get(NAMESPACE, [key(1)], [memoryview(target)], stall_s=5).result(
        PATIENCE_S
    ).landed == [0]
    assert (source == target).all()


# ── refusals ─────────────────────────────────────────────────────────────────────────────


def _strided():
    return memoryview(bytearray(BLOCK_BYTES))[::2]


BAD_GETS = {
    "an undeclared namespace": ("other", [key(1)], lambda: empty_rows(1)),
    "an empty key": (NAMESPACE, [b""], lambda: empty_rows(1)),
    "a key too long": (NAMESPACE, [b"x" * 129], lambda: empty_rows(1)),
    "a key of text": (NAMESPACE, ["text"], lambda: empty_rows(1)),
    "a row too many": (NAMESPACE, [key(1)], lambda: empty_rows(2)),
    "a row too large": (NAMESPACE, [key(1)], lambda: empty_rows(1, BLOCK_BYTES + 1)),
    "an empty row": (NAMESPACE, [key(1)], lambda: [memoryview(bytearray())]),
    "a row that is not contiguous": (NAMESPACE, [key(1)], lambda: [_strided()]),
    "a row that is no row": (NAMESPACE, [key(1)], lambda: [None]),
}


@pytest.mark.parametrize("case", BAD_GETS)
def test_what_the_protocol_forbids_is_not_sent(client, fake, case):
    namespace, keys, make_rows = BAD_GETS[case]
    got = client.get(namespace, keys, make_rows()).result(PATIENCE_S)
    assert isinstance(got.error, LocalProtocolError)
    assert got.outcomes == [GetOutcome.REFUSED] * len(keys)
    put = client.put(namespace, keys, make_rows()).result(PATIENCE_S)
    assert isinstance(put.error, LocalProtocolError)
    assert put.outcomes == [None] * len(keys)
    if "row" not in case:
        with pytest.raises(LocalProtocolError):
            client.lookup(namespace, keys).result(PATIENCE_S)
    assert not fake.all_asked(Get) + fake.all_asked(Put) + fake.all_asked(Lookup)
    assert client.counters()["local_errors"] >= 2


def test_a_row_that_cannot_be_written_is_refused_for_a_get_only(client):
    row = memoryview(bytes(BLOCK_BYTES))
    assert client.put(NAMESPACE, [key(1)], [row]).result(PATIENCE_S).created == 1
    got = client.get(NAMESPACE, [key(1)], [row]).result(PATIENCE_S)
    assert isinstance(got.error, LocalProtocolError)


def test_a_refused_request_says_why(client, fake):
    for kind in (Lookup, Get, Put):
        fake.rules[kind] = fake.refuse("too_large")
    with pytest.raises(RequestRefused) as refusal:
        client.lookup(NAMESPACE, [key(1)], timeout_s=1).result(PATIENCE_S)
    assert refusal.value.code == "too_large"
    got = client.get(NAMESPACE, [key(1)], empty_rows(1), stall_s=5).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.REFUSED]
    assert isinstance(got.error, RequestRefused)
    put = client.put(NAMESPACE, [key(1)], rows_of(range(1))).result(PATIENCE_S)
    assert isinstance(put.error, RequestRefused)
    assert client.counters()["refused"] == 3
    assert client.ready


def test_a_refused_batch_ends_its_request_without_sending_the_rest(fake, make_client):
    client = make_client(
        fake.endpoint, batch_bytes=BLOCK_BYTES, put_window_bytes=BLOCK_BYTES,
        get_window_bytes=BLOCK_BYTES,
    )  # fmt: skip
    keys = hold_blocks(fake, range(5))

    def refuse_second(kind):
        number = len(fake.all_asked(kind))
        return fake.answer if number == 1 else fake.refuse("internal")

    fake.rules[Get] = lambda asked: refuse_second(Get)(asked)
    fake.rules[Put] = lambda asked: refuse_second(Put)(asked)
    got = client.get(NAMESPACE, keys, empty_rows(5), stall_s=5).result(PATIENCE_S)
    assert got.outcomes == [HIT] + [GetOutcome.REFUSED] * 4
    put = client.put(NAMESPACE, keys, rows_of(range(5))).result(PATIENCE_S)
    assert put.outcomes == [PutOutcome.EXISTED, None, None, None, None]
    assert isinstance(put.error, RequestRefused)
    assert len(fake.all_asked(Get)) == len(fake.all_asked(Put)) == 2


def test_declined_blocks_are_counted_by_reason_over_all_batches(fake, make_client):
    client = make_client(fake.endpoint, batch_bytes=BLOCK_BYTES)
    fake.rules[Put] = lambda asked: fake.send(
        asked,
        Stored(
            request_id=asked.message.request_id, epoch=fake.epoch, total=1, created=0, existed=0,
            forced=0, duplicate=0, declined={Declined.NO_SLOT: 1},
            outcomes=bytes([PutOutcome.DECLINED]),
        ),
    )  # fmt: skip
    put = client.put(NAMESPACE, [key(1), key(2)], rows_of(range(2))).result(PATIENCE_S)
    assert put.declined == {"no_slot": 2}
    assert put.outcomes == [PutOutcome.DECLINED] * 2
    assert put.error is None


def test_nothing_asked_is_answered_at_once(client, fake):
    assert client.lookup(NAMESPACE, []).result(PATIENCE_S).states == b""
    assert client.get(NAMESPACE, [], []).result(PATIENCE_S).outcomes == []
    assert client.put(NAMESPACE, [], []).result(PATIENCE_S).total == 0
    assert client.touch(NAMESPACE, []).result(PATIENCE_S) == 0
    assert {type(asked.message) for asked in fake.asked} == {protocol.Hello}


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoint": "localhost"}, {"endpoint": "tcp://nowhere"}, {"endpoint": "tcp://a:b"},
        {"endpoint": "tcp://127.0.0.1:1", "batch_bytes": 0},
        {"endpoint": "tcp://127.0.0.1:1", "hello_timeout_s": -1.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_settings_fail_at_the_door(settings):
    with pytest.raises(ConfigError, match=next(reversed(settings))):
        RemoteClient(ClientConfig(**settings))


def test_impossible_declarations_fail_at_the_door(client):
    with pytest.raises(ConfigError, match="namespace"):
        client.declare("", 4096)
    with pytest.raises(ConfigError, match="block_bytes"):
        client.declare("large", protocol.MAX_FRAME_BYTES + 1)


# ── ends ─────────────────────────────────────────────────────────────────────────────────


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


def test_close_ends_every_request_exactly_once(client, fake):
    kinds = _silence_all(fake)
    keys = [key(number) for number in range(4)]
    futures = _everything(client, keys, empty_rows(4), rows_of(range(4)))
    for kind in kinds:
        fake.wait_for(kind)
    ends = []
    for future in futures:
        future.add_done_callback(ends.append)
    client.close()
    assert sorted(map(id, ends)) == sorted(map(id, futures))
    got, put, *others = futures
    assert got.result().outcomes == [GetOutcome.UNAVAILABLE] * 4
    assert isinstance(put.result().error, ServerUnavailable)
    assert all(isinstance(future.exception(), ServerUnavailable) for future in others)


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
        for _ in range(300):
            futures.append(client.get(NAMESPACE, keys, empty_rows(2)))
            futures.append(client.lookup(NAMESPACE, keys))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    eventually(lambda: len(futures) > 100)
    client.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not wait(futures, PATIENCE_S).not_done


def test_close_from_a_callback_does_not_wait_for_itself(client, fake):
    future = client.lookup(NAMESPACE, [key(1)], timeout_s=1)
    closed = threading.Event()
    future.add_done_callback(lambda _: (client.close(), closed.set()))
    assert closed.wait(PATIENCE_S)
    client.close()


def test_cancel_all_frees_every_row(client, fake):
    kinds = _silence_all(fake)
    keys = hold_blocks(fake, range(4))
    rows = empty_rows(4)
    futures = _everything(client, keys, rows, rows_of(range(4)))
    for kind in kinds:
        fake.wait_for(kind)
    assert client.cancel_all(PATIENCE_S)
    assert all(future.done() for future in futures)
    got, put, *others = futures
    assert got.result().outcomes == [GetOutcome.LATE] * 4
    assert isinstance(put.result().error, DeadlineExceeded)
    assert all(isinstance(future.exception(), DeadlineExceeded) for future in others)
    assert client.counters()["cancelled"] == 6

    (asked,) = fake.all_asked(Get)
    fake.do(lambda: fake.answer(asked))  # late: the rows belong to somebody else by now
    eventually(lambda: client.counters()["late_replies"] >= 5)
    assert_untouched(rows)
    fake.behave()
    assert client.ready
    assert client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S).landed == [0, 1, 2, 3]


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
    client = RemoteClient(ClientConfig(fake.endpoint))
    thread = client._loop._thread
    del client
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_an_exception_inside_the_loop_ends_requests_and_not_the_thread(
    client, fake, make_client, monkeypatch, caplog
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
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(client._loop.lanes.control, "receive", fail)
        client._loop.mailbox.wake()
        got, put = (future.result(PATIENCE_S) for future in futures)
    assert isinstance(got.error, ServerUnavailable)
    assert isinstance(put.error, ServerUnavailable)
    eventually(lambda: "a bug" in caplog.text)
    fake.behave()
    eventually(lambda: client.ready)
    assert client.put(NAMESPACE, keys, rows_of(range(1))).result(PATIENCE_S).created == 1
    assert client.counters()["internal_errors"] >= 1
    client._loop.counters["internal_errors"] = 0  # expected here, and nowhere else


def test_a_request_that_breaks_the_loop_ends_too(client, fake, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(client._loop.lanes.gets, "accept", fail)
    got = client.get(NAMESPACE, [key(1)], empty_rows(1), stall_s=5).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.UNAVAILABLE]
    monkeypatch.undo()
    eventually(lambda: client.counters()["internal_errors"] == 1)
    eventually(lambda: client.ready)
    client._loop.counters["internal_errors"] = 0


def test_the_client_needs_neither_torch_nor_vllm():
    code = (
        "import sys, remote_server.client;"
        "sys.exit(bool({'torch', 'vllm', 'kv_connector'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
