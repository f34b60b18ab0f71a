"""A server that is killed, or stands still, in the middle of every request."""

import time

import pytest
from chaos_client import JumpingClock
from oracle import LARGE
from phases import BLOCKS, PHASES, some

WHERE = [pytest.param(None, id="somewhere")] + [
    pytest.param(fraction, id=name, marks=pytest.mark.whole)
    for name, fraction in (("before", 0.0), ("after", 1.0))
]


@pytest.fixture
def server(renewed_server):
    return renewed_server


@pytest.fixture(params=WHERE)
def fraction(request, rng):
    """How much of the message that is held has gone through."""
    return rng.choice([0.0, rng.random(), 1.0]) if request.param is None else request.param


def works_again(client, proxy, server):
    """Behind `proxy`, `client` finds `server` by itself, and blocks go out and come back."""
    proxy.target = server.endpoint
    client.wait_until_ready()
    numbers = [7, 8, 9]
    assert client.finish(client.put(LARGE, numbers)) == "stored"
    assert client.finish(client.get(LARGE, numbers)) == "hit"


@pytest.mark.parametrize(
    "phase",
    some(PHASES, "tcp-get-blocks-2", "lanes-put-lane-2", "lanes-get-lane", "shm-put-put",
         "shm-get-got"),
)  # fmt: skip
def test_a_request_ends_at_once_when_its_server_is_killed(
    phase, fraction, server, proxy, make_client, rng
):
    """Not at its deadline, which is minutes away; and whatever it announces is right."""
    client = make_client(phase.transport)
    phase.prepare(client)
    caught = phase.catch(proxy, fraction)
    request = phase.begin(client, timeout_s=300)
    caught.wait()
    request.ends_by = time.monotonic()
    server.kill()
    caught.release(deliver=rng.random() < 0.5)
    client.finish(request)
    server.restart()
    works_again(client, proxy, server)
    assert client.client.counters()["server_restarts"] == 1
    assert client.finish(client.get(LARGE, BLOCKS)) == "miss", "the new server has nothing"


@pytest.mark.parametrize(
    "phase",
    some(PHASES, "tcp-put-put", "tcp-get-blocks", "lanes-put-lane", "lanes-get-lane-2",
         "shm-put-put", "shm-get-got", "shm-get-release"),
)  # fmt: skip
def test_a_request_ends_by_its_deadline_when_its_server_stands_still_and_late_bytes_go_nowhere(
    phase, fraction, server, proxy, make_client
):
    clock = JumpingClock()
    client = make_client(phase.transport, clock=clock)
    phase.prepare(client)
    caught = phase.catch(proxy, fraction)
    request = phase.begin(client)
    caught.wait()
    server.freeze()
    caught.release(deliver=True)
    clock.pass_deadline(client, request)  # poisons its rows
    server.thaw()
    works_again(client, proxy, server)
    client.check()  # looks at them again
    declined = server.stats().counters["put_declined_checksum"]
    assert declined == 0, "a row was read after it was taken back"
    # a put that its deadline cut short may have stored some of its blocks, but only right ones
    assert client.finish(client.get(LARGE, BLOCKS)) in ("hit", "miss", "part hit")
