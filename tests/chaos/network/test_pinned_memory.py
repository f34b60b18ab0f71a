"""A memory budget that is full of blocks on their way to a client that does not take them.

Over shared memory a client leases a sixteenth at most (`client/shm/test_shared_gets.py`), and
what was pinned for a client that has left is free (`server/test_server_limits.py`)."""

import pytest
from chaos_server import ChaosServer, eventually
from faults import TO_CLIENT, Faults
from oracle import LARGE, MEDIUM

NUM_BLOCKS, PER_REQUEST = 128, 16  # 8 MiB, all of the server's memory
TIMES = 4
"""Everything is asked for so often: the kernel's buffers hold the first few blocks."""

PATIENT = {"get_window_bytes": 128 << 20, "get_window_blocks": 4096}


def all_of(first):
    return [range(n, n + PER_REQUEST) for n in range(first, first + NUM_BLOCKS, PER_REQUEST)]


@pytest.fixture
def server():
    with ChaosServer("8MiB") as server:
        yield server


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
