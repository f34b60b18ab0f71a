"""What is not the block that was put is never announced, is counted by its reason, and goes.

Against a real server, whose memory this test damages, over all transports. Wrong messages of a
server are in `test_client_landing.py` and `test_shared_gets.py`.
"""

from collections.abc import Callable, Iterator

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, block, empty_rows, key, rows_of, transport_of
from fake_server import PATIENCE_S, eventually
from gates import copies_held
from memory_server import memory_server

from remote_server.client import GetOutcome, RemoteClient
from remote_server.protocol import Clear, Error, KeyState
from remote_server.server.server import Server

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, MISS, CORRUPT = GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT
REASONS = (
    "checksum_failures", "misplaced_blocks", "wrong_lengths", "short_blocks", "stale_epochs",
    "expired_blocks",
)  # fmt: skip


@pytest.fixture
def quiet_server() -> Iterator[Server]:
    with memory_server() as server:
        yield server


@pytest.fixture
def client(
    transport: str, quiet_server: Server, make_client: Callable[..., RemoteClient]
) -> RemoteClient:
    client = make_client(quiet_server.endpoint)
    keys = [key(n) for n in range(4)]
    assert client.put(NAMESPACE, keys, rows_of(range(4)), deferred=False).result().created == 4
    assert transport_of(client) == transport
    return client


def get(client: RemoteClient, numbers: range = range(4)) -> list[GetOutcome]:
    rows = empty_rows(len(numbers))
    got = client.get(NAMESPACE, [key(n) for n in numbers], rows).result(PATIENCE_S)
    for index in got.landed:
        assert rows[index] == block(numbers[index]), "announced and wrong"
    return got.outcomes


def in_memory(server: Server, number: int) -> memoryview:
    tier = server.store.memory
    (kept,) = tier.pin_all(NAMESPACE, [key(number)])
    tier.unpin_all([kept])
    return tier.view(kept)


def reasons(client: RemoteClient) -> dict[str, int]:
    counters = client.counters()
    return {name: counters[name] for name in REASONS if counters[name]}


def states(client: RemoteClient) -> list[int]:
    return list(client.lookup(NAMESPACE, [key(n) for n in range(4)]).result().states)


def test_a_bit_that_rots_in_memory_is_found_by_its_reader_and_its_block_removed(
    client: RemoteClient, quiet_server: Server
):
    in_memory(quiet_server, 2)[BLOCK_BYTES - 1] ^= 0x80
    assert get(client) == [HIT, HIT, CORRUPT, HIT]
    assert reasons(client) == {"checksum_failures": 1}
    eventually(lambda: client.counters()["verify_removed"] == 1)
    assert quiet_server.store.all_counters()["integrity_checksum"] == 1
    assert get(client) == [HIT, HIT, MISS, HIT], "quarantined: nobody meets it again"
    put = client.put(NAMESPACE, [key(2)], rows_of(range(2, 3)), deferred=False).result(PATIENCE_S)
    assert put.created == 1, "a good copy may take its place"
    assert get(client) == [HIT] * 4


def test_two_intact_blocks_in_each_others_place_are_both_found_and_removed(
    client: RemoteClient, quiet_server: Server
):
    """Each hashes well: only the identity within the checksum distinguishes them."""
    one, other = in_memory(quiet_server, 0), in_memory(quiet_server, 3)
    kept = bytes(one)
    one[:] = other
    other[:] = kept
    assert get(client) == [CORRUPT, HIT, HIT, CORRUPT]
    assert reasons(client) == {"checksum_failures": 2}
    eventually(lambda: client.counters()["verify_removed"] == 2)
    assert states(client) == [KeyState.ABSENT, KeyState.READABLE, KeyState.READABLE, 0]


def test_a_block_shorter_than_the_row_it_is_wanted_in_stays_where_it_is_right(
    client: RemoteClient, quiet_server: Server
):
    """The reader's mistake: the server's copy is intact, and others may want it."""
    short = rows_of(range(9, 10), 100)
    assert client.put(NAMESPACE, [key(9)], short, deferred=False).result(PATIENCE_S).created == 1
    assert get(client, range(9, 10)) == [CORRUPT]
    assert reasons(client) == {"wrong_lengths": 1}
    eventually(lambda: client.counters()["verify_intact"] == 1)
    assert quiet_server.store.all_counters()["integrity_checksum"] == 0


def test_a_reader_without_checksums_takes_what_it_gets(
    transport: str, quiet_server: Server, make_client: Callable[..., RemoteClient]
):
    """The switch is not harmless: it is for measuring."""
    client = make_client(quiet_server.endpoint, integrity=False)
    client.put(NAMESPACE, [key(0)], rows_of(range(1)), deferred=False).result(PATIENCE_S)
    in_memory(quiet_server, 0)[7] ^= 1
    rows = empty_rows(1)
    got = client.get(NAMESPACE, [key(0)], rows).result(PATIENCE_S)
    assert got.outcomes == [HIT] and rows[0] != block(0)
    assert reasons(client) == {}


# ── what the server counts of what comes to it ───────────────────────────────────────────


def test_a_forgotten_namespace_whose_put_is_still_being_copied_stays_forgotten(peer, server):
    with copies_held(server):
        peer.put([1], deferred=True)
        peer.ask(Clear(request_id=peer.next_id(), namespace="ns", forget=True))
    peer.stats_once(lambda stats: not stats.tiers["memory"].pinned)
    stats = peer.stats()
    assert stats.namespaces == {} and stats.tiers["memory"].used_bytes == 0


def test_forgetting_takes_a_name(peer):
    peer.put([1])
    refused = peer.ask(Clear(request_id=peer.next_id(), forget=True))
    assert isinstance(refused, Error) and refused.code == "bad_request"
    assert list(peer.lookup([1]).states) == [KeyState.READABLE], "and nothing was cleared"
