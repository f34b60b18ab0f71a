"""Long gets from a bucket: packs are read ahead, side by side and once each."""

from contextlib import closing

import pytest
from bucket_helpers import (
    ROW_BYTES,
    GatedObjects,
    LeapingClock,
    bucket_server,
    chain_of,
    find_packs,
    folder_url,
    hello,
    write_packs,
)
from fake_server import PATIENCE_S, eventually
from wire_peer import Peer, block, key

from remote_server.client import ClientConfig, RemoteClient, SharedRegion
from remote_server.store.bucket import opening

pytestmark = pytest.mark.real_time

ROWS_OF_A_PACK = 8
PACKS = 12
ROWS = PACKS * ROWS_OF_A_PACK
MEMORY = 64 << 20


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """The client of the store of every server here."""
    objects = GatedObjects(folder_url(tmp_path))
    monkeypatch.setattr(opening, "ProcessObjects", lambda *_: objects)
    return objects


@pytest.fixture
def clock():
    return LeapingClock()


@pytest.fixture
def server(objects, context, clock):
    """One that has found `PACKS` packs that another server wrote."""
    write_packs(objects.url, context, PACKS)
    with bucket_server(objects.url, clock, memory=MEMORY) as second:
        find_packs(hello(Peer(context, second.endpoint)), PACKS)
        objects.num_reads = 0
        try:
            yield second
        finally:
            objects.let_all_go()


@pytest.fixture
def peer(server, context):
    return hello(Peer(context, server.endpoint))


def client_of(server, **options) -> RemoteClient:
    """Over tcp it requests a pack's rows in four parts, and has at most one pack on its way."""
    client = RemoteClient(
        ClientConfig(
            server.endpoint, batch_bytes=2 * ROW_BYTES, get_window_bytes=8 * ROW_BYTES,
            lane_window_bytes=8 * ROW_BYTES, **options,
        )
    )  # fmt: skip
    client.declare("ns", ROW_BYTES, {})
    eventually(lambda: client.ready)
    return client


def pack_of(number: int) -> range:
    return range(number * ROWS_OF_A_PACK, (number + 1) * ROWS_OF_A_PACK)


def get_all(client: RemoteClient, timeout_s: float = PATIENCE_S, rows=None):
    """A get of the whole prompt, and its rows."""
    rows = rows or [memoryview(bytearray(ROW_BYTES)) for _ in range(ROWS)]
    keys = [key(number) for number in range(ROWS)]
    return client.get("ns", keys, rows, stall_s=timeout_s, timeout_s=timeout_s), rows


def test_a_long_get_has_many_packs_read_at_a_time(server, objects):
    objects.is_held = True
    with closing(client_of(server)) as client:
        got, rows = get_all(client)
        calls = [objects.next_held() for _ in range(PACKS)]
        objects.is_held = False
        assert not got.done(), "all packs are being read, and none has come"
        for call in calls:
            call.ends()
        assert len(got.result(PATIENCE_S).landed) == ROWS
        assert [bytes(row) for row in rows] == [block(n, ROW_BYTES) for n in range(ROWS)]
    assert objects.num_reads == PACKS


def test_a_long_get_over_shared_memory_has_many_packs_read_at_a_time(server, objects):
    """Its window is a sixteenth of the memory: two thirds of the prompt."""
    objects.is_held = True
    region = SharedRegion(ROWS * ROW_BYTES)
    rows = [region.view[n * ROW_BYTES :][:ROW_BYTES] for n in range(ROWS)]
    with closing(region), closing(client_of(server)) as client:
        client.register(region.view, region.fd)
        eventually(lambda: client.transport == "shm")
        got, _ = get_all(client, rows=rows)
        calls = [objects.next_held() for _ in range(PACKS)]
        objects.is_held = False
        for call in calls:
            call.ends()
        assert len(got.result(PATIENCE_S).landed) == ROWS
        assert client.counters()["shm_bytes_in"] == ROWS * ROW_BYTES
        assert [bytes(row) for row in rows] == [block(n, ROW_BYTES) for n in range(ROWS)]
        for row in rows:
            row.release()
    assert objects.num_reads == PACKS


def test_a_pack_is_read_once_for_many_clients_that_request_it_in_parts(server, objects, peer):
    clients = [client_of(server) for _ in range(4)]
    gets = [get_all(client)[0] for client in clients]
    for got in gets:
        assert len(got.result(PATIENCE_S).landed) == ROWS
    for client in clients:
        client.close()
    counters = peer.stats().counters
    assert counters["bucket_packs_read"] == objects.num_reads == PACKS
    assert counters["hits_bucket"] + counters["hits_memory"] == counters["get_hit"] == 4 * ROWS
    assert counters["hits_bucket"] >= ROWS, "each row came from there once, for the first client"


def test_the_other_rows_of_a_pack_are_in_memory_after_one_of_them_was_read(peer, objects):
    _, arrived = peer.get(range(3, 4))
    assert [data for _, data in arrived] == [block(3, ROW_BYTES)]
    assert peer.stats().tiers["memory"].blocks == ROWS_OF_A_PACK
    _, arrived = peer.get(range(ROWS_OF_A_PACK))
    assert [data for _, data in arrived] == [block(n, ROW_BYTES) for n in range(ROWS_OF_A_PACK)]
    assert objects.num_reads == 1
    counters = peer.stats().counters
    assert (counters["hits_bucket"], counters["hits_memory"]) == (ROWS_OF_A_PACK, 1)
    assert counters["bucket_rows_fetched"] == ROWS_OF_A_PACK


def test_what_a_client_no_longer_waits_for_is_not_read(server, objects, peer):
    server.store.read_ahead.want("ns", [key(n) for n in range(ROWS)], deadline=0.0)
    assert peer.stats().counters["bucket_packs_read"] == objects.num_reads == 0


def test_a_lookup_tells_which_rows_are_in_the_bucket_alone(server, peer):
    found = peer.lookup(range(ROWS), chain=chain_of(ROWS))
    assert found.prefix == ROWS and found.remote == [0, ROWS]
    peer.get(pack_of(1))
    found = peer.lookup(range(ROWS), chain=chain_of(ROWS))
    assert found.prefix == ROWS
    assert found.remote == [0, ROWS_OF_A_PACK, 2 * ROWS_OF_A_PACK, ROWS - 2 * ROWS_OF_A_PACK]


def test_a_client_learns_of_them_over_any_number_of_messages(server, monkeypatch):
    with closing(client_of(server)) as client:
        monkeypatch.setattr(
            client._loop.session, "limits", client._loop.session.limits._replace(max_keys=5)
        )
        keys = [key(n) for n in (*range(3), 1000, *range(3, 20))]
        found = client.lookup("ns", keys, timeout_s=PATIENCE_S).result()
    runs = zip(found.remote[::2], found.remote[1::2], strict=True)
    remote = [keys[first + n] for first, number in runs for n in range(number)]
    assert remote == [key(n) for n in range(20)]


def test_rows_of_a_pack_are_not_read_to_be_written_again_one_by_one(server, peer, objects):
    """A lookup without chain fields names each row as a pack of its own."""
    objects.is_held = True
    assert peer.lookup(range(ROWS)).prefix == ROWS
    assert not server.store.tier_stack.busy and not objects.num_reads


def test_a_server_without_a_bucket_wants_no_keys_ahead(context, tmp_path):
    with bucket_server("", disk=str(tmp_path / "disk")) as server:
        assert server.store.read_ahead.most_bytes == 0
        peer = Peer(context, server.endpoint)
        assert peer.hello(block_bytes=ROW_BYTES).ahead_bytes == 0


def test_rows_of_a_pack_that_memory_has_no_room_for_are_read_alone(objects, context):
    """A pack of an eighth of the memory or more brings no other rows."""
    write_packs(objects.url, context, 1, memory=2 << 20)
    with bucket_server(objects.url, memory=2 << 20) as server:
        find_packs(peer := hello(Peer(context, server.endpoint)), 1)
        _, arrived = peer.get(range(3, 5))
        assert [data for _, data in sorted(arrived)] == [block(n, ROW_BYTES) for n in (3, 4)]
        stats = peer.stats()
        assert stats.tiers["memory"].blocks == 2
        assert stats.counters["bucket_read_bytes"] == 2 * ROW_BYTES
