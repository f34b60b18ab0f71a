"""A server that is late or silent: the breaker opens, and closes by itself."""

import logging

import pytest
from client_helpers import (
    NAMESPACE,
    assert_unavailable,
    assert_works,
    empty_rows,
    key,
    rows_of,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually

from remote_server.client import ClientConfig
from remote_server.errors import DeadlineExceeded
from remote_server.protocol import Get, Hello, Lookup, Put

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]


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
    futures = [
        client.get(NAMESPACE, [key(n)], empty_rows(1), stall_s=60, timeout_s=600) for n in range(2)
    ]
    futures.append(client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=60))
    fake.wait_for(Get, number=2)
    fake.wait_for(Put)
    client.check()
    clock.advance(60.1)
    for future in futures:
        future.result(PATIENCE_S)
    eventually(lambda: client.counters()["breaker_opened"] == 1)
    clock.advance(1)
    eventually(lambda: client.ready)
