"""A memory budget that is full of blocks on their way to a client that does not take them."""

import time

import pytest
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from faults import TO_CLIENT, Faults
from oracle import LARGE, MEDIUM

from remote_server.client.lease import SHARE_OF_ARENA

NUM_BLOCKS, PER_REQUEST = 128, 16  # 8 MiB, all of the server's memory
TIMES = 4
"""Everything is asked for so often: the kernel's buffers hold the first few blocks."""

PATIENT = {"get_window_bytes": 128 << 20, "get_window_blocks": 4096}


def all_of(first):
    return [range(n, n + PER_REQUEST) for n in range(first, first + NUM_BLOCKS, PER_REQUEST)]


@pytest.fixture(scope="module")
def lasting_server():
    with ChaosServer("8MiB") as server:
        yield server


@pytest.fixture
def server(renewed_server):
    return renewed_server


def test_what_is_pinned_stays_whole_and_others_are_declined_until_it_is_taken(
    server, proxy, make_client
):
    """Over tcp a block is pinned until the kernel has it."""
    slow = make_client("tcp", num_pieces=TIMES * NUM_BLOCKS // PER_REQUEST, **PATIENT)
    other = make_client("tcp", server.endpoint)
    for numbers in all_of(0):
        assert slow.finish(slow.put(MEDIUM, numbers)) == "stored"
    proxy.set(Faults(frozen=frozenset({TO_CLIENT})))
    gets = [slow.get(MEDIUM, numbers, timeout_s=60) for numbers in all_of(0) * TIMES]
    eventually(lambda: server.stats().tiers["memory"].pinned == NUM_BLOCKS, "every block is pinned")

    for numbers in all_of(5000)[:4]:
        assert other.finish(other.put(MEDIUM, numbers)) == "declined"
    assert other.finish(other.put(LARGE, [1])) == "declined", "nor is there a slab to be taken"
    assert other.finish(other.lookup(MEDIUM, range(16))) == "answered"
    stats = server.stats()
    assert stats.counters["put_declined_no_slot"] == 4 * PER_REQUEST + 1
    assert stats.counters["evicted"] == 0

    proxy.clear()
    assert {slow.finish(get) for get in gets} == {"hit"}
    server.wait_until_at_rest()
    assert other.finish(other.put(MEDIUM, all_of(5000)[0])) == "stored"
    assert other.finish(other.get(MEDIUM, all_of(5000)[0])) == "hit"


def test_over_shared_memory_one_client_keeps_a_sixteenth_of_the_memory_at_most(
    server, proxy, make_client
):
    """A block is pinned until its lease is released; other clients can still put."""
    slow = make_client("shm", num_pieces=NUM_BLOCKS // PER_REQUEST, shared_window_bytes=1 << 30)
    other = make_client("shm", server.endpoint)
    for numbers in all_of(0):
        assert slow.finish(slow.put(MEDIUM, numbers)) == "stored"
    proxy.set(Faults(frozen=frozenset({TO_CLIENT})))
    gets = [slow.get(MEDIUM, numbers, timeout_s=60) for numbers in all_of(0)[-4:]]
    eventually(lambda: server.stats().tiers["memory"].pinned, "something is leased")
    for numbers in all_of(5000):
        assert other.finish(other.put(MEDIUM, numbers)) == "stored"
        assert server.stats().tiers["memory"].pinned <= NUM_BLOCKS // SHARE_OF_ARENA
    proxy.clear()
    assert {slow.finish(get) for get in gets} <= {"hit", "part hit", "miss"}
    server.wait_until_at_rest()


def test_what_is_pinned_for_a_client_whose_connection_breaks_is_given_back_when_it_leaves(
    server, proxy
):
    """Also what has not been handed to libzmq yet: it takes 64 messages, and these are more."""
    num_pieces = TIMES * NUM_BLOCKS // PER_REQUEST
    with ChaosClient(proxy.endpoint, "tcp", num_pieces=num_pieces, **PATIENT) as slow:
        slow.wait_until_ready()
        for numbers in all_of(0):
            assert slow.finish(slow.put(MEDIUM, numbers)) == "stored"
        proxy.set(Faults(frozen=frozenset({TO_CLIENT})))
        gets = [slow.get(MEDIUM, numbers, timeout_s=60) for numbers in all_of(0) * TIMES]
        eventually(
            lambda: server.stats().tiers["memory"].pinned == NUM_BLOCKS, "every block is pinned"
        )
        proxy.set(Faults(refuse=True))
        for get in gets:
            get.ends_by = time.monotonic()
            assert slow.finish(get) in ("unavailable", "part hit", "hit")
        slow.check()
    server.wait_until_at_rest()
