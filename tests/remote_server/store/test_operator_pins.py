"""What an operator keeps in memory, from the arena up to the client."""

from concurrent.futures import Future

import pytest
from one_by_one import OneByOne
from wire_peer import key

from remote_server.client.connection.limits import Limits
from remote_server.client.requests import requests
from remote_server.protocol import Error, Keep, Kept, KeyState
from remote_server.shm.mapping import Arena
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end

pytestmark = pytest.mark.real_time

SLAB_BYTES, NUM_SLABS = 4096, 16
SMALL, LARGE = 512, 2048  # 8 and 2 to a slab
CAPACITY = NUM_SLABS * SLAB_BYTES // SMALL


@pytest.fixture
def make():
    """A tier of 128 small blocks; its books are checked when the test is over."""
    made = []

    def tier(**options):
        arena = Arena(NUM_SLABS * SLAB_BYTES)
        made.append((arena, OneByOne(MemoryTier(arena, SLAB_BYTES, **options))))
        return made[-1][1]

    yield tier
    for arena, one in made:
        one.check()
        arena.close()


@pytest.fixture
def tier(make):
    return make()


def put(tier, names, namespace="ns", block_bytes=SMALL, data=b"old"):
    kept = []
    for name in names:
        block = tier.begin_put(namespace, b"%d" % name, block_bytes, block_bytes, 0)
        if block is not None:
            tier.view(block)[:3] = data
            kept.append(tier.complete_put(block))
    return len(kept)


def readable(tier, names, namespace="ns"):
    return [n for n in names if tier.lookup(namespace, b"%d" % n) is KeyState.READABLE]


def keys(names):
    return [b"%d" % name for name in names]


def scan(tier, **options):
    assert put(tier, range(1000, 1000 + 10 * CAPACITY), "scan", **options)


def test_half_of_the_memory_may_be_kept_and_the_rest_is_declined(tier):
    put(tier, range(CAPACITY))
    half = CAPACITY // 2
    assert tier.pin_for_operator("ns", keys(range(CAPACITY))) == (half, half * SMALL, half)
    assert tier.pin_for_operator("ns", keys(range(half))) == (half, half * SMALL, 0), (
        "are kept already"
    )
    assert tier.counters()["keep_declined"] == half
    scan(tier)
    assert readable(tier, range(CAPACITY)) == [*range(half)]
    assert tier.num_blocks("scan") == half
    tier.unpin_for_operator("ns", tier.operator_pins.keys("ns"))
    others = tier.readable_keys("scan")
    assert tier.pin_for_operator("scan", others) == (half, half * SMALL, 0), (
        "the half is free again"
    )


def test_half_of_a_quota_may_be_kept_so_that_its_namespace_still_takes_puts(make):
    tier = make(namespace_bytes=10 * SMALL)
    put(tier, range(10))
    assert tier.pin_for_operator("ns", keys(range(10))) == (5, 5 * SMALL, 5)
    put(tier, range(100, 120))
    assert readable(tier, range(120)) == [*range(5), *range(115, 120)]


LETTING_GO = {
    "let go": lambda tier: tier.unpin_for_operator("ns", keys(range(4))),
    "cleared": lambda tier: tier.clear("ns"),
    "all cleared": lambda tier: tier.clear(None),
    "bad": lambda tier: [tier.remove(tier._index["ns"][name]) for name in keys(range(4))],
    "asked for when too old": lambda tier: tier.expire("ns", keys(range(4)), 1.0),
    "swept when too old": lambda tier: tier.expire_some(1.0, 100),
}


@pytest.mark.parametrize("ending", LETTING_GO)
@pytest.mark.parametrize("being_sent", [False, True])
def test_nothing_stays_pinned_of_what_is_no_longer_kept(tier, ending, being_sent):
    put(tier, range(4))
    tier.pin_for_operator("ns", keys(range(4)))
    sent = tier.pin_all("ns", keys(range(4))) if being_sent else []
    LETTING_GO[ending](tier)
    stats = tier.stats()
    assert (stats.kept, stats.pinned) == (0, len(sent))
    tier.check()
    tier.unpin_all(sent)
    scan(tier)
    assert (readable(tier, range(4)), tier.stats().pinned) == ([], 0)
    assert tier.num_blocks("scan") == CAPACITY
    assert tier.pin_for_operator("scan", tier.readable_keys("scan")).kept == CAPACITY // 2, (
        "books of nothing"
    )


def test_without_keys_all_that_are_there_are_kept_but_for_those_too_old(make):
    now = 0.0
    tier = make()
    store = Store(tier.tier, lambda: now, ttl_s=10.0)
    store.namespaces.declare("ns", NamespaceInfo(block_bytes=SMALL))
    for name in (b"old", b"young"):
        reserved = store.puts.begin(Offered("ns", [name], [SMALL], [0]), force=False)
        store.puts.end(reserved, [True])
        now += 6.0
    assert to_end(store.pin("ns", None)) == (1, SMALL, 0)
    assert tier.operator_pins.keys("ns") == [b"young"]
    assert store.all_counters()["expired"] == 1
    assert to_end(store.unpin("ns", None)) == (1, SMALL, 0)
    assert to_end(store.unpin("ns", None)) == to_end(store.pin("unknown", None)) == (0, 0, 0)


# ── over the wire ────────────────────────────────────────────────────────────────────────


def test_more_keys_than_a_message_may_have_are_refused_and_nothing_is_kept(peer):
    peer.put([1])
    reply = peer.ask(Keep(request_id=9, namespace="ns", keys=[key(1)] * 16_385))
    assert isinstance(reply, Error) and reply.code == "bad_message"
    assert peer.stats().tiers["memory"].kept == 0


def test_a_client_asks_in_several_messages_and_gives_the_sum():
    future = Future()
    ask = requests.keep(future, "ns", [b"1", b"2", b"3"], 1.0, keep=False)
    messages = [part(request_id=1) for part in ask.split(Limits(max_keys=2))]
    assert [(message.keys, message.keep) for message in messages] == [
        ([b"1", b"2"], False), ([b"3"], False)
    ]  # fmt: skip
    ask.end([Kept(request_id=n, epoch="e", kept=n, bytes=5, declined=2) for n in (1, 2)])
    done = future.result(0)
    assert (done.kept, done.bytes, done.declined) == (3, 10, 4)
    (everything,) = requests.keep(future, "ns", None, 1.0, keep=True).split(Limits(max_keys=2))
    assert everything(request_id=1).keys is None
