"""A server that is late, frozen or killed: the breaker opens, and closes by itself."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from client_helpers import (
    NAMESPACE,
    assert_unavailable,
    assert_untouched,
    assert_works,
    block,
    empty_rows,
    key,
    rows_of,
    transport_of,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually

from remote_server.client import ClientConfig, GetOutcome, IoThread
from remote_server.errors import (
    DeadlineExceeded,
)
from remote_server.protocol import Get, Hello, Lookup, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


@pytest.fixture
def io_thread(own_or_shared: IoThread | None) -> IoThread | None:
    return own_or_shared


UNAVAILABLE = GetOutcome.UNAVAILABLE


def _time_out(client, clock, fake, number):
    for _ in range(number):
        asked = len(fake.all_asked(Lookup))
        future = client.lookup(NAMESPACE, [key(0)], timeout_s=0.1)
        fake.wait_for(Lookup, asked + 1)
        client.check()
        clock.advance(0.101)
        assert isinstance(future.exception(PATIENCE_S), DeadlineExceeded)


def test_three_timeouts_open_the_breaker_and_a_hello_closes_it(fake, make_client, clock, caplog):
    caplog.set_level(logging.INFO)
    client = make_client(fake.endpoint, clock=clock, breaker_backoff_s=0.25)
    fake.silence(Lookup, Hello)
    _time_out(client, clock, fake, 2)
    assert client.ready
    _time_out(client, clock, fake, 1)
    eventually(lambda: not client.ready)
    asked = len(fake.asked)
    assert_unavailable(client)
    client.check()
    assert len(fake.asked) == asked, "nothing is sent while it is open"

    for backoff_s in (0.25, 0.5, 1.0):
        hellos = len(fake.all_asked(Hello))
        clock.advance(backoff_s - 0.01)
        client.check()
        assert len(fake.all_asked(Hello)) == hellos
        clock.advance(0.02)
        fake.wait_for(Hello, hellos + 1)
        assert_unavailable(client)
        clock.advance(ClientConfig(fake.endpoint).hello_timeout_s)
        eventually(lambda n=hellos: client.counters()["timeouts_hello"] == n)

    fake.behave()
    clock.advance(2.1)
    eventually(lambda: client.ready)
    assert client.counters()["breaker_opened"] == 1
    assert_works(client, fake)
    of_session = [one.levelname for one in caplog.records if one.name.endswith(".session")]
    assert of_session == ["INFO", "WARNING", "INFO"]


def test_what_is_in_flight_when_the_breaker_opens_may_still_arrive(fake, make_client, clock):
    client = make_client(fake.endpoint, clock=clock)
    fake.silence(Lookup, Put, Hello)
    put = client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=60)
    (asked,) = fake.wait_for(Put)
    _time_out(client, clock, fake, 3)
    eventually(lambda: not client.ready)
    fake.do(lambda: fake.answer(asked))
    assert put.result(PATIENCE_S).created == 1
    assert not client.ready
    fake.behave()
    clock.advance(10)
    eventually(lambda: client.ready)


def test_stalled_gets_and_late_puts_count_for_the_breaker(fake, make_client, clock):
    client = make_client(fake.endpoint, clock=clock)
    fake.silence(Get, Put)
    futures = [client.get(NAMESPACE, [key(n)], empty_rows(1), stall_s=0.2) for n in range(2)]
    futures.append(client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=0.2))
    fake.wait_for(Get, 2)
    fake.wait_for(Put)
    client.check()
    clock.advance(0.201)
    for future in futures:
        future.result(PATIENCE_S)
    eventually(lambda: client.counters()["breaker_opened"] == 1)
    clock.advance(1)
    eventually(lambda: client.ready)


def test_an_unanswered_first_hello_is_repeated(fake, make_client, clock):
    fake.silence(Hello)
    client = make_client(fake.endpoint, clock=clock, wait=False)
    fake.wait_for(Hello)
    client.check()
    clock.advance(1.1)
    eventually(lambda: client.counters()["timeouts_hello"] == 1)
    fake.behave()
    clock.advance(1.1)
    eventually(lambda: client.ready)


SERVER = """
import sys, threading
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 << 20, populate=False)
with Server(config) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def server_process():
    """A real server in a process of its own; (process, endpoint)."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, process.stdout.readline().strip()
    process.send_signal(signal.SIGCONT)
    process.stdin.close()
    process.stdout.close()
    process.wait(PATIENCE_S)


def _is_stopped(pid: int) -> bool:
    stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_a_frozen_server_costs_one_deadline_and_is_back_when_it_thaws(
    transport, server_process, make_client
):
    process, endpoint = server_process
    client = make_client(endpoint)
    keys = [key(number) for number in range(8)]
    put = client.put(NAMESPACE, keys, rows_of(range(8)), deferred=False).result(PATIENCE_S)
    assert put.created == 8

    os.kill(process.pid, signal.SIGSTOP)
    eventually(lambda: _is_stopped(process.pid))
    rows = empty_rows(8)
    gets = [client.get(NAMESPACE, keys, rows, stall_s=0.25) for _ in range(3)]
    for get in gets:
        assert get.result(PATIENCE_S).outcomes == [GetOutcome.LATE] * 8
    eventually(lambda: not client.ready)
    got = client.get(NAMESPACE, keys, rows).result(PATIENCE_S)
    assert got.outcomes == [UNAVAILABLE] * 8
    put = client.put(NAMESPACE, keys, rows_of(range(8)), timeout_s=0.1)
    late_put = put.result(PATIENCE_S)
    assert late_put.error is not None
    assert_untouched(rows)

    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: client.ready)
    got = client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S)
    assert got.landed == list(range(8))
    assert all(row == block(number) for number, row in enumerate(rows))
    eventually(lambda: transport_of(client) == transport)


def test_a_killed_server_is_noticed_at_once(transport, server_process, make_client):
    process, endpoint = server_process
    client = make_client(endpoint)
    process.kill()
    eventually(lambda: not client.ready)
    assert_unavailable(client)
