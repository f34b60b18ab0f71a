"""The client and its server: coming, going, restarts, and hellos."""

import logging
import socket
from contextlib import ExitStack

import pytest
import zmq
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_unavailable,
    assert_untouched,
    assert_works,
    empty_rows,
    hold_blocks,
    io_thread_held,
    key,
    rows_of,
    turn,
)  # fmt: skip
from fake_server import PATIENCE_S, FakeServer, eventually
from msgspec.structs import replace

from examples.processes import free_port
from remote_server import protocol
from remote_server.client import GetOutcome
from remote_server.client.connection.session import REFUSED_RETRY_S
from remote_server.client.loop import Loop
from remote_server.errors import (
    ConfigError,
    DeadlineExceeded,
    LocalProtocolError,
    RequestRefused,
    ServerUnavailable,
)
from remote_server.protocol import EngineReport, Get, Hello, Lookup, Put, Stats

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


UNAVAILABLE = GetOutcome.UNAVAILABLE


@pytest.fixture
def unused_port():
    """An endpoint where no process listens."""
    return f"tcp://127.0.0.1:{free_port()}"


# ── coming and going ─────────────────────────────────────────────────────────────────────


def test_a_forgotten_namespace_is_not_declared_again_and_not_waited_for(fake, client):
    client.declare("next weights", BLOCK_BYTES)
    client.forget(NAMESPACE)
    eventually(lambda: client.ready, "the new namespace is welcome")
    error = client.lookup(NAMESPACE, [key(0)]).exception(PATIENCE_S)
    assert isinstance(error, LocalProtocolError)
    fake.close()
    eventually(lambda: not client.ready)
    with FakeServer(fake.endpoint, epoch="epoch-2") as successor:
        eventually(lambda: client.epoch == "epoch-2" and client.ready)
        assert set(successor.namespaces) == {"next weights"}
    assert client.counters()["server_restarts"] == 1


def test_a_server_that_comes_later_is_found_without_help(make_client, unused_port, caplog):
    caplog.set_level(logging.INFO, "remote_server")
    client = make_client(unused_port, wait=False)
    eventually(lambda: caplog.records, "it is said that no server is there")
    assert_unavailable(client)
    assert not client.ready and client.absent
    assert client.epoch is None
    with FakeServer(unused_port) as fake:
        eventually(lambda: client.ready)
        assert client.epoch == "epoch-1"
        assert not client.absent, "requests are held while it gets to know another namespace"
        assert_works(client, fake)
    assert client.counters()["unavailable"] == 4
    said = [record.getMessage() for record in caplog.records]
    assert sum("no server there yet" in line for line in said) == 1
    assert sum("ready, epoch" in line for line in said) == 1


def test_a_peer_that_speaks_something_else_does_not_end_the_search(make_client, unused_port):
    """libzmq gives an address up for good when its peer breaks ZMTP; we do not."""
    host, port = unused_port.removeprefix("tcp://").split(":")
    with socket.create_server((host, int(port))) as web_server:
        client = make_client(unused_port, wait=False)
        for _ in range(3):
            connection, _ = web_server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
            connection.close()
    assert not client.ready
    with FakeServer(unused_port) as fake:
        eventually(lambda: client.ready)
        assert_works(client, fake)


# ── epochs ───────────────────────────────────────────────────────────────────────────────


def test_what_the_old_server_said_is_ignored(client, fake):
    """Also when it arrives after the new one's welcome, and without greeting the new one again."""
    fake.silence(Get)
    keys, rows = hold_blocks(fake, range(1)), empty_rows(1)
    got = client.get(NAMESPACE, keys, rows, stall_s=60, timeout_s=60)
    (asked,) = fake.wait_for(Get)
    old = fake.blocks_for(asked, [0])
    fake.epoch = "epoch-2"
    found = client.lookup(NAMESPACE, keys, timeout_s=60)
    assert isinstance(found.exception(PATIENCE_S), ServerUnavailable)
    assert got.result(PATIENCE_S).outcomes == [UNAVAILABLE]
    eventually(lambda: client.ready)
    assert client.epoch == "epoch-2"
    hellos = client.counters()["hellos"]
    fake.do(lambda: fake.send(asked, *old))

    def answer(asked):
        late = protocol.Found(
            request_id=asked.message.request_id, epoch="epoch-1", prefix=0, states=b"\0"
        )
        fake.send(asked, late)
        fake.answer(asked)

    fake.behave()
    fake.rules[Lookup] = answer
    assert client.lookup(NAMESPACE, keys).result(PATIENCE_S).prefix == 1
    assert_untouched(rows)
    assert client.counters()["hellos"] == hellos
    assert client.counters()["server_restarts"] == 1
    assert client.counters()["stale_epochs"] == 1
    assert_works(client, fake)


def test_a_server_that_returns_to_an_old_epoch_is_believed(client, fake):
    """When a welcome announces it: a client that contradicts its server is stuck."""
    for number, epoch in enumerate(("epoch-2", "epoch-1", "epoch-2")):
        fake.epoch = epoch
        client.declare(f"reason-to-say-hello-{number}", 100)
        eventually(lambda epoch=epoch: client.ready and client.epoch == epoch)
        assert_works(client, fake)


# ── hellos ───────────────────────────────────────────────────────────────────────────────


def test_hello_says_who_we_are(fake, make_client):
    client = make_client(fake.endpoint, client_name="engine-7", block_bytes=0)
    client.declare("model", 12345, {"dtype": "bf16"})
    eventually(lambda: client.ready)
    hello = fake.namespaces["model"]
    assert (hello.block_bytes, hello.client) == (12345, "engine-7")
    assert hello.fingerprint == {"dtype": "bf16"}
    assert hello.protocol == protocol.PROTOCOL_VERSION


def test_a_client_without_namespaces_may_ask_for_stats_and_recovers_from_silence(
    fake, make_client, clock
):
    client = make_client(fake.endpoint, block_bytes=0, clock=clock)
    assert client.stats().result(PATIENCE_S).server == "fake"
    assert not fake.all_asked(Hello)
    fake.silence(Stats)
    for number in range(2, 5):
        future = client.stats(timeout_s=60)
        fake.wait_for(Stats, number)
        turn(client)
        clock.advance(60.1)
        assert isinstance(future.exception(PATIENCE_S), DeadlineExceeded)
    fake.behave()

    def has_recovered() -> bool:
        clock.advance(0.01)
        return client.stats(timeout_s=60).exception(PATIENCE_S) is None

    eventually(has_recovered)


def test_a_namespace_may_be_declared_at_any_time(client, fake):
    client.declare("epoch-of-new-weights", 2 * BLOCK_BYTES)
    eventually(lambda: client.ready)
    rows = rows_of(range(1), 2 * BLOCK_BYTES)
    put = client.put("epoch-of-new-weights", [key(1)], rows).result(PATIENCE_S)
    assert put.created == 1
    client.declare("epoch-of-new-weights", 2 * BLOCK_BYTES)  # the same again: nothing to send
    client.check()
    assert len(fake.all_asked(Hello)) == 2


def test_ready_is_never_true_of_a_namespace_that_the_loop_learns_of_while_it_is_asked(
    fake, make_client, monkeypatch
):
    client = make_client(fake.endpoint, block_bytes=0)
    fake.silence(Hello)
    was_ready = vars(Loop)["ready"].fget
    with ExitStack() as held:
        held.enter_context(io_thread_held(client, fake))
        client.declare("new", 4096)

        def read_and_let_the_loop_go_on(loop):
            before = was_ready(loop)
            held.close()
            fake.wait_for(Hello)  # the loop has taken the declaration over
            return before

        monkeypatch.setattr(Loop, "ready", property(read_and_let_the_loop_go_on))
        assert not client.ready
        monkeypatch.undo()


def test_a_refused_namespace_is_unavailable_and_the_others_are_not(timed, fake, clock, caplog):
    def answer(asked):
        rule = fake.answer
        if asked.message.namespace == "refused":
            rule = fake.refuse("block_bytes_mismatch")
        rule(asked)

    fake.rules[Hello] = answer
    timed.declare("refused", 100)
    fake.wait_for(Hello, number=2)
    eventually(lambda: timed.counters()["refused"] == 1)
    assert not timed.ready
    got = timed.get("refused", [key(0)], empty_rows(1, 100)).result(PATIENCE_S)
    assert got.outcomes == [UNAVAILABLE]
    assert "block_bytes_mismatch" in str(got.error)
    assert_works(timed, fake)
    clock.advance(REFUSED_RETRY_S + 1)
    fake.wait_for(Hello, number=3)
    eventually(lambda: timed.counters()["refused"] == 2)
    assert caplog.text.count("namespace refused refused") == 1, "said once, not per attempt"
    fake.behave()
    clock.advance(REFUSED_RETRY_S + 1)
    eventually(lambda: timed.ready)


def test_a_forgotten_namespace_is_declared_again(client, fake):
    fake.rules[Put] = fake.refuse("unknown_namespace")
    put = client.put(NAMESPACE, [key(1)], rows_of(range(1))).result(PATIENCE_S)
    assert isinstance(put.error, RequestRefused)
    fake.behave()
    fake.wait_for(Hello, number=2)
    eventually(lambda: client.ready)
    assert client.put(NAMESPACE, [key(1)], rows_of(range(1))).result(PATIENCE_S).created == 1
    assert client.counters()["unknown_namespace"] == 1


def test_limits_beyond_the_protocol_are_not_believed(client, fake):
    fake.rules[Hello] = lambda asked: fake.send(
        asked, replace(fake.welcome(asked), max_keys=10**9, max_message_bytes=-5)
    )
    client.declare("second", 100)
    eventually(lambda: client.ready)
    keys = [key(1)] * (protocol.MAX_KEYS_PER_MESSAGE + 1)
    assert len(client.lookup(NAMESPACE, keys, timeout_s=PATIENCE_S).result().states) == len(keys)
    asked = [len(one.message.keys) for one in fake.all_asked(Lookup)]
    assert asked == [protocol.MAX_KEYS_PER_MESSAGE, 1]
    assert client.put(NAMESPACE, [key(1)], rows_of(range(1))).result(PATIENCE_S).created == 1


def test_what_happens_to_a_connection_is_read_without_keeping_anything(fake, make_client):
    """Every pause before reconnecting is another number; none of them may stay behind."""
    client = make_client(fake.endpoint)
    members = len(zmq.Event._value2member_map_)
    host, port = fake.endpoint.removeprefix("tcp://").rsplit(":", 1)
    fake.close()
    with socket.create_server((host, int(port))) as listener:
        for _ in range(12):  # four times for each of its connections
            listener.accept()[0].close()
    client.check()
    assert client.counters()["disconnects"]
    assert len(zmq.Event._value2member_map_) == members


# ── reports ──────────────────────────────────────────────────────────────────────────────


def test_a_report_goes_out_at_once_and_with_each_later_hello(fake, client):
    def reports() -> list[EngineReport | None]:
        return [asked.message.report for asked in fake.all_asked(Hello)]

    assert reports() == [None]
    first, second = EngineReport("vLLM 0.32.0"), EngineReport("vLLM 0.32.0", 100, {"pool": 10})
    client.report(first)
    eventually(lambda: reports() == [None, first], "a hello with the report")
    client.report(first)
    client.report(second)
    eventually(lambda: reports() == [None, first, second], "one hello for each that is new")
    assert client.ready, "the namespace stayed welcome"
    fake.epoch = "epoch-2"
    client.stats()
    eventually(lambda: reports()[-1:] == [second] and client.ready, "it is known after a restart")


def test_a_report_that_no_server_takes_is_refused_here(client):
    with pytest.raises(ConfigError, match="report"):
        client.report(EngineReport("\x1b[2J"))
