"""`POST /prefetch`: what is on disk comes into memory before a client gets it."""

import asyncio
import json

import aiohttp
import pytest
from admin_http import Http, served, write_token
from disk_server import IN_MEMORY, LENGTH, put_all
from gates import jobs_held
from wire_peer import Peer, block, key

from remote_server.admin import site
from remote_server.server.upkeep import prefetches as prefetch
from remote_server.server.upkeep.prefetches import MAX_PREFETCHES
from remote_server.values import MiB

pytestmark = pytest.mark.real_time

PUT = 3 * IN_MEMORY
HALF = IN_MEMORY // prefetch.SHARE_OF_MEMORY
NOTHING = {"in_memory": 0, "read": 0, "absent": 0, "no_room": 0, "coming": 0}


@pytest.fixture
def small_pair(tmp_path, monkeypatch):
    """A memory of sixteen blocks above a disk, with a token. It waits for the disk."""
    monkeypatch.setattr(site, "READ_S", 60.0)
    with served(
        memory=MiB, disk=str(tmp_path / "disk"), disk_bytes=64 * MiB,
        admin_token_file=write_token(tmp_path),
    ) as pair:  # fmt: skip
        yield pair


@pytest.fixture
async def ask(small_pair):
    """`await ask(range(4))` → status, and what became of these keys."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        http = Http(session, small_pair[1].url)

        async def ask(numbers, namespace="big", **options):
            body = {"namespace": namespace, "keys": [key(number).hex() for number in numbers]}
            status, _, text = await http.post("/prefetch", **{"json": body, **options})
            return status, json.loads(text) if status in (200, 202) else text

        yield ask


@pytest.fixture
def peer(small_pair, context):
    """`PUT` blocks were put, of which memory has the last sixteen."""
    peer = Peer(context, small_pair[0].endpoint)
    put_all(peer, PUT)
    return peer


async def test_what_was_prefetched_is_served_from_memory(ask, peer):
    before = peer.stats().counters
    assert await ask(range(4)) == (200, NOTHING | {"read": 4})
    after = peer.stats().counters
    assert after["disk_promoted"] - before["disk_promoted"] == 4
    for hits in ("hits_memory", "hits_disk", "get_total"):
        assert after[hits] == before[hits], "nobody has got anything"
    assert peer.get(range(4), "big")[1] == [(n, block(n, LENGTH)) for n in range(4)]
    last = peer.stats()
    assert last.counters["hits_memory"] - after["hits_memory"] == 4
    assert last.counters["disk_promoted"] == after["disk_promoted"]
    assert last.tiers["memory"].pinned == 0


async def test_every_key_is_accounted_for_once(ask, peer):
    there = [PUT - 1, PUT - 2]
    wanted = [*there, 1, 2, 1, 999, 1000]
    expected = NOTHING | {"in_memory": 2, "read": 2, "absent": 2}
    assert await ask(wanted) == (200, expected)
    assert await ask(wanted) == (200, NOTHING | {"in_memory": 4, "absent": 2})


async def test_no_more_than_half_of_the_memory_is_taken_and_the_head_of_the_prefix_first(ask, peer):
    assert await ask(range(20)) == (200, NOTHING | {"read": HALF, "no_room": 20 - HALF})
    before = peer.stats().counters["disk_promoted"]
    peer.get(range(HALF), "big")
    assert peer.stats().counters["disk_promoted"] == before


async def test_where_everything_is_pinned_nothing_is_read_and_nothing_is_lost(
    ask, peer, small_pair
):
    memory = small_pair[0].store.memory
    last = [key(number) for number in range(PUT - IN_MEMORY, PUT)]
    pinned = await asyncio.wrap_future(
        small_pair[0].loop_calls.call(lambda: memory.pin_all("big", last))
    )
    assert None not in pinned
    assert await ask(range(3)) == (200, NOTHING | {"no_room": 3})
    small_pair[0].loop_calls.call(lambda: memory.unpin_all(pinned)).result(30)
    assert await ask(range(3)) == (200, NOTHING | {"read": 3})


async def test_a_slow_disk_is_answered_before_it_is_done_and_goes_on(
    ask, peer, small_pair, monkeypatch
):
    monkeypatch.setattr(site, "READ_S", 0.05)
    with jobs_held(small_pair[0].tenants[""].storage.disk.pool):
        status, done = await ask(range(3))
        assert (status, done) == (202, NOTHING | {"coming": 3})
        assert peer.lookup([PUT - 1], "big").prefix == 1, "others are served"
    peer.stats_once(lambda stats: stats.counters["disk_promoted"] == 3)
    assert (await ask(range(3)))[1]["in_memory"] == 3


async def test_a_few_prefetches_at_a_time_and_more_are_refused(ask, peer, small_pair, monkeypatch):
    monkeypatch.setattr(site, "READ_S", 0.05)
    with jobs_held(small_pair[0].tenants[""].storage.disk.pool):
        for number in range(MAX_PREFETCHES):
            assert (await ask([number]))[0] == 202
        status, text = await ask([30])
        assert status == 503 and "prefetches are under way" in text
    peer.stats_once(lambda stats: stats.counters["disk_promoted"] == MAX_PREFETCHES)
    monkeypatch.setattr(site, "READ_S", 60.0)
    assert await ask([30]) == (200, NOTHING | {"read": 1})


@pytest.mark.parametrize("step", ["_take_part", "_count_read"])
async def test_prefetches_that_fail_are_logged_and_give_their_places_back(
    ask, peer, monkeypatch, caplog, step
):
    """Before the disk is read, and after."""

    def broken(*_):
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(prefetch.Prefetch, step, broken)
        for number in range(10, 10 + MAX_PREFETCHES + 1):
            assert (await ask([number]))[0] == 500
    assert "a prefetch failed inside the server" in caplog.text
    assert await ask([1]) == (200, NOTHING | {"read": 1})
    assert peer.stats().tiers["memory"].pinned == 0
    assert peer.stats().counters["internal_errors"] == MAX_PREFETCHES + 1


REFUSED = [
    ({"namespace": "big", "keys": ["xyz"]}, 400, "'xyz' is not hexadecimal"),
    ({"namespace": "big", "keys": ["00" * 129]}, 400, "a key of 129 bytes: 1 to 128"),
    ({"namespace": "big", "keys": [""]}, 400, "a key of 0 bytes"),
    ({"namespace": "big", "keys": []}, 400, "length >= 1"),
    ({"namespace": "big", "keys": ["00"] * 16_385}, 400, "length <= 16384"),
    ({"namespace": "big"}, 400, "missing required field `keys`"),
    ({"namespace": "other", "keys": ["00"]}, 404, "there is no namespace 'other'"),
]


async def test_what_cannot_be_prefetched_is_refused_with_the_reason_and_without_a_token(ask, peer):
    for body, status, said in REFUSED:
        got, text = await ask([], json=body)
        assert got == status and said in text
    assert (await ask([1], token=None))[0] == 401
    assert (await ask([1], token="a" * 32))[0] == 401
    assert peer.stats().counters["disk_promoted"] == 0


async def test_as_many_keys_as_a_message_may_have_are_read_in_parts(ask, peer, small_pair):
    most = 16_384
    status, done = await ask(range(most))
    assert status == 200
    assert sum(done.values()) == most
    assert done["no_room"] == most - HALF


async def test_a_server_without_a_disk_knows_what_is_in_memory(tmp_path, context):
    with served(admin_token_file=write_token(tmp_path)) as (server, admin):
        peer = Peer(context, server.endpoint)
        peer.hello()
        peer.put(range(600))
        async with aiohttp.ClientSession() as session:
            body = {"namespace": "ns", "keys": [key(number).hex() for number in range(700)]}
            status, _, text = await Http(session, admin.url).post("/prefetch", json=body)
        assert status == 200, text
        assert json.loads(text) == NOTHING | {"in_memory": 600, "absent": 100}
