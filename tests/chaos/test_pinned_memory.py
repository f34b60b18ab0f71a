"""A memory budget that is full of blocks on their way to clients that do not take them."""

from fault_proxy import BOTH, TO_CLIENT, TO_SERVER, Faults
from oracle import MEDIUM

NUM_PIECES, PER_PIECE = 32, 16  # 32 MiB, all of the server's memory
PATIENT = {"get_window_bytes": 64 << 20, "get_window_blocks": 4096, "num_pieces": NUM_PIECES}


def pieces(first):
    return [range(n, n + PER_PIECE) for n in range(first, first + NUM_PIECES * PER_PIECE, PER_PIECE)]


def test_what_is_pinned_stays_and_others_are_declined_until_it_is_taken(
    server, proxy, transport, make_client
):
    """Over tcp blocks are pinned until the kernel has them, over shared memory until their
    lease is released."""
    slow = make_client(transport, **PATIENT)
    other = make_client(transport, server.endpoint)
    for numbers in pieces(0):
        assert slow.finish(slow.put(MEDIUM, numbers)) == "stored"
    way = TO_CLIENT if transport == "tcp" else TO_SERVER
    caught = None
    if transport == "shm":
        caught = proxy.catch(TO_SERVER, "release")  # and with it all that comes after it
        gets = [slow.get(MEDIUM, pieces(0)[0], timeout_s=60)]
        slow.finish(gets.pop())
        caught.wait()
    else:
        proxy.set(Faults(frozen=frozenset({way})))
    gets = [slow.get(MEDIUM, numbers, timeout_s=60) for numbers in pieces(0)]
    words = [other.finish(other.put(MEDIUM, numbers)) for numbers in pieces(5000)]
    stats = server.stats()
    print(words.count("declined"), stats.tiers["memory"])
    assert BOTH
    proxy.clear()
    if caught is not None:
        caught.let_go(deliver=True)
    print([slow.finish(get) for get in gets])
