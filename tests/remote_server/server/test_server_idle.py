"""A server without requests, on a clock that the test moves."""

import logging

import pytest
from wire_peer import BLOCK_BYTES

from remote_server.server import loop_calls
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.store.namespaces import NamespaceInfo
from remote_server.values import MiB

pytestmark = pytest.mark.real_time


@pytest.fixture
def clock():
    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def idle_server(clock):
    """Started, and not serving: the test runs the loop's parts by hand."""
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)
    server = Server(config, clock)
    server.start()
    yield server
    server.stop()


def put(server, key: bytes):
    server.store.namespaces.declare("ns", NamespaceInfo(block_bytes=BLOCK_BYTES))
    reserved = server.store.puts.begin("ns", [key], [10], [0], force=False, draining=False)
    server.store.puts.end(reserved, [True])
    return reserved.blocks[0]


def test_books_that_do_not_add_up_are_reported_and_counted_when_idle(idle_server, clock, caplog):
    block = put(idle_server, b"k")
    block.slab.tick_sum += 1
    idle_server._check_periodically(idle=True)
    clock.now += loop_calls.CHECK_INTERVAL_S
    idle_server._check_periodically(idle=False)
    assert not caplog.records
    idle_server._check_periodically(idle=True)
    assert "counts disagree" in caplog.text
    assert idle_server.store.counters["failed_checks"] == 1
    block.slab.tick_sum -= 1


def test_the_check_is_left_out_when_it_would_keep_clients_waiting(idle_server, clock, monkeypatch):
    block = put(idle_server, b"k")
    block.slab.tick_sum += 1
    monkeypatch.setattr(loop_calls, "CHECK_MAX_BLOCKS", 0)
    clock.now += loop_calls.CHECK_INTERVAL_S
    idle_server._check_periodically(idle=True)
    assert idle_server.store.counters["failed_checks"] == 0
    block.slab.tick_sum -= 1


def test_a_line_a_minute_says_what_happened_and_nothing_when_nothing_did(
    idle_server, clock, caplog
):
    with caplog.at_level(logging.INFO):
        put(idle_server, b"k")
        idle_server.store.gets.lookup("ns", [b"k", b"other"])
        for _ in range(3):
            clock.now += loop_calls.REPORT_INTERVAL_S
            idle_server._check_periodically(idle=False)
    assert len(caplog.records) == 1
    assert "memory 4.0 KiB of 16.0 MiB in 1 blocks" in caplog.text
    assert "lookups 1 of 2 keys hit" in caplog.text
