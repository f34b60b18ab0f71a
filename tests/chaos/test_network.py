"""Everything a network can do to a connection that goes on existing, or seems to."""

import time

import pytest
from chaos_server import ChaosServer, eventually
from faults import BOTH, TO_CLIENT, TO_SERVER, Faults
from oracle import LARGE, MEDIUM, NAMESPACES, SMALL
from tampering import TAMPERS, ReorderMessages

from remote_server.protocol import PAGE_BYTES

NUMBERS = range(3)
WAYS = {"to the server": frozenset({TO_SERVER}), "to the client": frozenset({TO_CLIENT})}


@pytest.fixture(scope="module")
def server():
    """One for all: nothing here is done to the server itself."""
    with ChaosServer() as server:
        yield server
        server.wait_until_at_rest()


@pytest.fixture
def client(make_client, transport):
    """With some blocks of each size stored."""
    client = make_client(transport)
    for namespace in NAMESPACES:
        assert client.finish(client.put(namespace, NUMBERS)) == "stored"
    return client


def recovers(client, patience_s=20.0):
    """Hits come again without outside help, and the client is at rest afterwards."""
    client.wait_until_ready(patience_s)
    for namespace in NAMESPACES:
        words = []
        while "stored" not in words:
            words.append(client.finish(client.put(namespace, NUMBERS, timeout_s=0.5)))
            assert len(words) < 2 * patience_s, words
        while "hit" not in words:
            words.append(client.finish(client.get(namespace, NUMBERS, timeout_s=0.5)))
            assert len(words) < 2 * patience_s, words


def a_few_of_each(client, timeout_s):
    """Every kind of request, one at a time; their words."""
    words = []
    for namespace in NAMESPACES:
        words += [
            client.finish(client.lookup(namespace, NUMBERS, timeout_s)),
            client.finish(client.get(namespace, NUMBERS, timeout_s)),
            client.finish(client.put(namespace, NUMBERS, timeout_s, force=True)),
            client.finish(client.touch(namespace, NUMBERS, timeout_s)),
        ]
    return words


DEAD = {
    "black hole": Faults(swallowed=BOTH),
    "frozen": Faults(frozen=BOTH),
    **{f"half-open {name}": Faults(swallowed=way) for name, way in WAYS.items()},
    **{f"frozen {name}": Faults(frozen=way) for name, way in WAYS.items()},
}


@pytest.mark.parametrize("what", DEAD)
def test_on_a_dead_connection_few_requests_wait_for_their_deadline_and_all_end(what, client, proxy):
    proxy.set(DEAD[what])
    words = [word for _ in range(8) for word in a_few_of_each(client, timeout_s=0.1)]
    assert set(words) <= {"late", "unavailable"}, words
    assert words.count("late") <= 8, "the breaker opens after 3 in a row, once or twice"
    proxy.clear()
    recovers(client)


def test_a_connection_that_was_replaced_in_a_black_hole_is_replaced_again_soon(make_client, proxy):
    """A part of its handshake was lost. libzmq waits five seconds for it, and meanwhile every get
    would be late, at a server that answers all else."""
    client = make_client("tcp")
    assert client.finish(client.put(MEDIUM, NUMBERS)) == "stored"
    proxy.set(DEAD["black hole"])
    assert client.finish(client.get(MEDIUM, NUMBERS, timeout_s=0.2)) == "late"
    eventually(lambda: client.client.counters()["get_resets"], "gets have another connection")
    began, num_lost = time.monotonic(), proxy.counts["swallowed"]
    eventually(lambda: proxy.counts["swallowed"] > num_lost, "its handshake is lost")
    proxy.clear()
    client.wait_until_ready()
    while client.finish(client.get(MEDIUM, NUMBERS, timeout_s=0.2)) != "hit":
        assert time.monotonic() < began + 4.0, "gets are late for as long as libzmq waits"


def test_where_connections_are_refused_requests_are_turned_away(client, proxy):
    proxy.set(Faults(refuse=True))
    words = a_few_of_each(client, timeout_s=2.0) + a_few_of_each(client, timeout_s=2.0)
    assert words.count("unavailable") >= len(words) - 1, words
    eventually(lambda: proxy.counts["refused"], "it has tried to connect again")
    proxy.clear()
    recovers(client)


def test_200_ms_cost_whoever_cannot_wait_a_miss_and_nobody_else(client, proxy):
    proxy.set(Faults(latency_s=0.1))
    assert client.finish(client.get(MEDIUM, NUMBERS, timeout_s=5)) == "hit"
    assert client.finish(client.get(MEDIUM, NUMBERS, timeout_s=0.05)) == "late"
    assert client.finish(client.lookup(MEDIUM, NUMBERS, timeout_s=0.05)) == "late"
    assert client.finish(client.get(MEDIUM, NUMBERS, timeout_s=5)) == "hit"
    assert client.finish(client.put(LARGE, NUMBERS, timeout_s=5, force=True)) == "stored"
    proxy.clear()
    recovers(client)


def test_at_2_s_the_breaker_opens_and_what_comes_too_late_goes_nowhere(client, proxy):
    proxy.set(Faults(latency_s=1.0))
    words = [word for _ in range(5) for word in a_few_of_each(client, timeout_s=0.05)]
    assert set(words) <= {"late", "unavailable"}, words
    assert words.count("unavailable") > len(words) / 2
    proxy.clear()
    recovers(client)


def test_over_1_megabyte_a_second_a_get_goes_on_as_long_as_something_comes(
    make_client, proxy, server
):
    """Rather than being given up because all of it takes long."""
    client = make_client("tcp", get_window_bytes=LARGE.block_bytes, batch_bytes=1)
    assert client.finish(client.put(LARGE, NUMBERS)) == "stored"
    proxy.set(Faults(bytes_per_s=1_000_000))
    assert client.finish(client.get(LARGE, NUMBERS, timeout_s=20, stall_s=0.9)) == "hit"
    landed = []
    for timeout_s in (0.5, 0.6, 0.7):  # a busy host may take the whole of the first
        request = client.get(LARGE, NUMBERS, timeout_s=timeout_s)
        landed.append(len(request.wait().landed))
        client.finish(request)
        if landed[-1]:
            break
    assert 0 < landed[-1] < 3, f"some of it came in time, and is there to be used: {landed}"
    proxy.clear()
    recovers(client)


@pytest.mark.parametrize("name", [*TAMPERS, "reorder messages"])
@pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.whole)])
def test_whatever_becomes_of_messages_on_the_way_nothing_wrong_is_announced(
    name, share, client, proxy, whole
):
    """The oracle of `ChaosClient` checks every row that was announced as landed."""
    tamper = TAMPERS.get(name) or ReorderMessages()
    proxy.set(Faults(tamper=tamper, share=share))
    for _ in range(8 if whole else 2):
        a_few_of_each(client, timeout_s=0.1)
    happened = sum(proxy.counts.values())
    payload_only = name == "flip payload" and client.transport == "shm"
    assert (happened == 0) if payload_only else (happened > 0), "payload is not on this wire"
    proxy.clear()
    recovers(client)
    assert client.finish(client.get(SMALL, NUMBERS)) == "hit"


def test_a_put_that_comes_again_when_its_rows_are_in_use_changes_no_block(
    make_client, proxy, server
):
    """Only the first page of each row was announced, and that one is still there."""
    client, puts = make_client("shm"), []

    def note(_, unit):
        puts.append(unit.raw)
        return [unit.raw]

    proxy.shoot(TO_SERVER, note, "put")
    request = client.put(LARGE, NUMBERS, force=True)
    request.wait()
    for row in request.rows:
        row[PAGE_BYTES:] = bytes(row.nbytes - PAGE_BYTES)
    again = proxy.shoot(TO_SERVER, lambda _, unit: [puts[0], unit.raw], "stats")
    declined = server.stats().counters["put_declined_withdrawn"]
    client.finish(client.stats())
    assert again.hit.is_set()
    eventually(
        lambda: server.stats().counters["put_declined_withdrawn"] > declined, "it is declined"
    )
    assert client.finish(client.get(LARGE, NUMBERS)) == "hit"
    client.finish(request)
