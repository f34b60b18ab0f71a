"""Everything a network can do to a connection that goes on existing, or seems to."""

from functools import partial

import pytest
from chaos_client import REQUEST_S, JumpingClock, retried
from chaos_server import ChaosServer, eventually
from faults import BOTH, TO_CLIENT, TO_SERVER, Faults
from oracle import LARGE, NAMESPACES, SMALL
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
def clock():
    return JumpingClock()


@pytest.fixture
def client(make_client, transport, clock):
    """With some blocks of each size stored."""
    client = make_client(transport, clock=clock)
    for namespace in NAMESPACES:
        assert client.finish(client.put(namespace, NUMBERS)) == "stored"
    return client


def recovers(client):
    """Hits come again without outside help."""
    for namespace in NAMESPACES:
        retried(client, "stored", lambda timeout_s: client.put(namespace, NUMBERS, timeout_s))  # noqa: B023
        retried(client, "hit", lambda timeout_s: client.get(namespace, NUMBERS, timeout_s))  # noqa: B023


def a_few_of_each(client, end, timeout_s=REQUEST_S):
    """Every kind of request, one at a time; how each ended, by `end`, which waits for it."""
    words = []
    for namespace in NAMESPACES:
        words += [
            end(client.lookup(namespace, NUMBERS, timeout_s)),
            end(client.get(namespace, NUMBERS, timeout_s)),
            end(client.put(namespace, NUMBERS, timeout_s, force=True)),
            end(client.touch(namespace, NUMBERS, timeout_s)),
        ]
    return words


DEAD = {
    "black hole": Faults(swallowed=BOTH),
    "half-open to the client": Faults(swallowed=WAYS["to the client"]),
    "frozen to the server": Faults(frozen=WAYS["to the server"]),
    "frozen": Faults(frozen=BOTH),
    "half-open to the server": Faults(swallowed=WAYS["to the server"]),
    "frozen to the client": Faults(frozen=WAYS["to the client"]),
}
QUICK = [*DEAD][:3]


@pytest.mark.parametrize(
    "what", [pytest.param(w, marks=() if w in QUICK else pytest.mark.whole) for w in DEAD]
)
def test_on_a_dead_connection_few_requests_wait_for_their_deadline_and_all_end(
    what, client, clock, proxy
):
    proxy.set(DEAD[what])
    end = partial(clock.pass_deadline, client)
    words = [word for _ in range(3) for word in a_few_of_each(client, end)]
    assert set(words) == {"late", "unavailable"}
    assert words.count("late") <= client.config.breaker_timeouts + 1, words
    proxy.clear()
    recovers(client)


def test_where_connections_are_refused_requests_are_turned_away(client, proxy):
    proxy.set(Faults(refuse=True))
    words = a_few_of_each(client, client.finish) + a_few_of_each(client, client.finish)
    assert words.count("unavailable") >= len(words) - 1, words
    eventually(lambda: proxy.counts["refused"], "it has tried to connect again")
    proxy.clear()
    recovers(client)


@pytest.mark.timeout(480)
@pytest.mark.parametrize("share", [0.3, pytest.param(1.0, marks=pytest.mark.whole)])
def test_whatever_becomes_of_messages_on_the_way_nothing_wrong_is_announced(
    share, client, proxy, whole
):
    """The oracle of `ChaosClient` checks every row that was announced as landed."""
    for name in (*TAMPERS, "reorder messages"):
        tamper = TAMPERS.get(name) or ReorderMessages()
        counted = getattr(tamper, "__name__", type(tamper).__name__)
        is_on_this_wire = name != "flip payload" or client.transport != "shm"
        rounds, before = 0, proxy.counts[counted]
        proxy.set(Faults(tamper=tamper, share=share))
        while rounds < (3 if whole else 1) or (is_on_this_wire and proxy.counts[counted] == before):
            rounds += 1
            a_few_of_each(client, client.finish, timeout_s=0.1 * rounds)
        assert (proxy.counts[counted] > before) == is_on_this_wire
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
