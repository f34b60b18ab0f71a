"""Clients that leave, one after the other, and the tables of the server: none keeps an entry of
theirs."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from lane_peer import WireLane
from wire_peer import Peer, SharedPeer

from remote_server.protocol import Stats
from remote_server.server.server import Server

pytestmark = pytest.mark.real_time

NUM_FIRST, NUM_MORE = 12, 25
"""A key remembers ten of the connections that get it."""

BY_TIME = ("_use_times", "curve", "_prompt_ends")
"""Tables of moments and of prompts, not of clients."""

EMPTIED_LATER = ("server.tenants[].local._leaving", "server.tenants[].send_queues._queues")
"""With an entry until a thread has unmapped a region, or a message has left: none at rest."""

NUMBERS = range(4)
PATIENCE_S = 30.0


def entries(server: Server) -> Counter[str]:
    """The number of entries of each table of the server, by its place, in a call of its loop."""
    found: Counter[str] = Counter()
    seen: set[int] = set()

    def look(place: str, one: object) -> None:
        if id(one) in seen or place.rpartition(".")[2] in BY_TIME:
            return
        seen.add(id(one))
        if isinstance(one, dict | list | set | deque):
            found[place] += len(one)
            for inner in [*one.values()] if isinstance(one, dict) else [*one]:
                look(f"{place}[]", inner)
        elif type(one).__module__.startswith("remote_server"):
            for name, inner in fields(one):
                look(f"{place}.{name}", inner)

    server.loop_calls.call(lambda: look("server", server)).result(PATIENCE_S)
    return found


def fields(one: object) -> Iterator[tuple[str, object]]:
    slots = [getattr(kind, "__slots__", ()) for kind in type(one).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    for name in [*names, *getattr(one, "__dict__", ())]:
        if hasattr(one, name):
            yield name, getattr(one, name)


def one_of_tcp(peer: Peer) -> None:
    peer.hello(client="of tcp", fleet="0" * 16)
    peer.put(NUMBERS)
    peer.lookup(NUMBERS)
    peer.get(NUMBERS)
    peer.send_get(NUMBERS)  # its answer is never read
    peer.close()


def one_of_shared_memory(peer: Peer) -> None:
    shared = SharedPeer(peer)
    shared.put(NUMBERS, namespace="of shared peers")
    shared.lease(NUMBERS, namespace="of shared peers")  # it is never released
    shared.close()
    peer.close()


def one_with_lanes(peer: Peer) -> None:
    if not peer.hello().max_lanes:
        pytest.skip("no C library was built")
    WireLane.announce(peer)  # its token is never used
    lane = WireLane(peer)
    lane.put(NUMBERS)
    lane.send_get(NUMBERS)  # its blocks are never read
    peer.send(lane.put_message(NUMBERS)[0])  # its blocks never come
    peer.send(Stats(request_id=(last := peer.next_id())))
    while peer.receive()[0].request_id != last:
        pass
    peer.close()
    with suppress(ConnectionResetError):
        while lane.socket.recv(1 << 16):  # the lane ends with its connection
            pass
    lane.close()


def one_that_never_introduces_itself(peer: Peer) -> None:
    peer.stats()
    peer.close()


@pytest.mark.parametrize(
    "come_and_go",
    [one_of_tcp, one_of_shared_memory, one_with_lanes, one_that_never_introduces_itself],
)
def test_clients_that_have_left_have_no_entry_in_any_table(
    server: Server, connect: Callable[..., Peer], come_and_go: Callable[[Peer], None]
) -> None:
    observer = connect()

    def after(number: int) -> Counter[str]:
        for _ in range(number):
            come_and_go(connect())
        deadline = time.monotonic() + PATIENCE_S
        while server._auth.num_connections > 1 or regions(observer):
            assert time.monotonic() < deadline, "a connection stays"
            time.sleep(0.005)
        while True:
            observer.stats()  # the loop takes note of those that have ended when a message comes
            observer.stats()
            found = entries(server)
            assert found.keys() >= {*EMPTIED_LATER}
            if not any(found[table] for table in EMPTIED_LATER):
                return found
            assert time.monotonic() < deadline, "an entry of a client that left stays"
            time.sleep(0.005)

    observer.hello()
    first = after(NUM_FIRST)
    assert after(NUM_MORE) == first
    tables = [name for name in first if name.endswith("connections._of_client")]
    assert [first[name] for name in tables] == [1], "the tables are found"


def regions(observer: Peer) -> int:
    counters = observer.stats().counters
    return counters["regions_attached"] - counters["regions_gone"]
