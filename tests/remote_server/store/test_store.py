import pytest

from remote_server.errors import RequestRefused
from remote_server.protocol import Declined, ErrorCode, PutOutcome
from remote_server.shm.mapping import Arena
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end
from remote_server.values import MiB

BLOCK_BYTES = 4096
INFO = NamespaceInfo(block_bytes=BLOCK_BYTES)
A, B, C, D = b"a", b"b", b"c", b"d"


@pytest.fixture
def store():
    arena = Arena(1 * MiB)
    store = Store(MemoryTier(arena))
    store.namespaces.declare("ns", INFO)
    yield store
    store.tier_stack.check()
    arena.close()


def begin(store, *keys, force=False):
    sums = [0] * len(keys)
    return store.puts.begin(Offered("ns", keys, [BLOCK_BYTES] * len(keys), sums), force=force)


def put(store, *keys, **how):
    reserved = begin(store, *keys, **how)
    store.puts.end(reserved, [True] * len(reserved.blocks))
    return reserved


def counted(store, prefix):
    return {
        name.removeprefix(prefix): count
        for name, count in store.all_counters().items()
        if name.startswith(prefix) and count
    }


def test_a_key_being_written_exists_already(store):
    first = begin(store, A)
    assert [*begin(store, A).outcomes] == [PutOutcome.EXISTED]
    store.puts.end(first, [True])


def test_bytes_that_landed_wrong_are_declined_and_counted(store):
    reserved = begin(store, A, B, C)
    store.puts.end(reserved, [True, False, True])
    assert [*reserved.outcomes] == [PutOutcome.CREATED, PutOutcome.DECLINED, PutOutcome.CREATED]
    assert reserved.reasons == {Declined.CHECKSUM: 1}
    assert store.gets.lookup("ns", [A, B, C]).states == bytes([2, 0, 2])
    assert counted(store, "put_") == {"total": 3, "created": 2, "declined_checksum": 1}


@pytest.mark.parametrize(
    ("keys", "states", "prefix"),
    [([A, B, C], [2, 0, 2], 1), ([B, A], [0, 2], 0), ([A, C], [2, 2], 2), ([], [], 0),
     ([A, A], [2, 2], 2)],
)  # fmt: skip
def test_a_lookup_answers_per_key_and_with_the_longest_prefix(store, keys, states, prefix):
    put(store, A, C)
    assert store.gets.lookup("ns", keys)[:2] == (bytes(states), prefix)


def test_an_unknown_namespace_is_all_misses(store):
    assert store.gets.lookup("unknown", [A]).states == bytes(1)
    assert to_end(store.gets.get("unknown", [A])).miss == 1
    assert to_end(store.gets.touch("unknown", [A])) == 0
    assert store.clear("unknown") == {"memory": 0}


@pytest.mark.parametrize("use", ["put", "get", "touch"])
def test_the_tail_of_a_prefix_leaves_before_its_head(store, use):
    chain = [b"%d" % n for n in range(MiB // BLOCK_BYTES)]
    put(store, *chain)
    if use == "get":
        for block in to_end(store.gets.get("ns", chain)).blocks:
            store.memory.unpin_all([block])
    elif use == "touch":
        to_end(store.gets.touch("ns", chain))
    put(store, A)
    assert store.gets.lookup("ns", chain).prefix == len(chain) - 1


def test_a_namespace_has_one_block_size(store):
    store.namespaces.declare("ns", INFO)
    reserved = store.puts.begin(Offered("ns", [b"k"], [1], [None]), force=False)
    for _ in ("being written", "readable"):
        with pytest.raises(RequestRefused, match="4096 bytes, not 8192") as caught:
            store.namespaces.declare("ns", NamespaceInfo(block_bytes=8192))
        assert caught.value.code == ErrorCode.BLOCK_BYTES_MISMATCH
        assert store.namespaces.known["ns"].block_bytes == BLOCK_BYTES
        if reserved.blocks[0].pins:
            store.puts.end(reserved, [True])
    store.clear("ns")
    store.namespaces.declare("ns", NamespaceInfo(block_bytes=8192))
    assert store.namespaces.known["ns"].block_bytes == 8192


def test_a_block_too_large_for_the_budget_is_told_what_would_be_enough(store):
    with pytest.raises(RequestRefused, match=r"the largest is 65536; --memory 2097152") as caught:
        store.namespaces.declare("large", NamespaceInfo(block_bytes=128 * 1024))
    assert caught.value.code == ErrorCode.TOO_LARGE
    assert "large" not in store.namespaces.known
