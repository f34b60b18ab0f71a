"""Removal from the bucket by servers that do not know of each other."""

import os
import time
from itertools import repeat

import pytest
from bucket_helpers import (
    ROW_BYTES,
    LeapingClock,
    RealBucket,
    bucket_server,
    chain_of,
    folder_url,
    hello,
)
from tenancy import Tenancy
from wire_peer import Peer, block, key

from remote_server.protocol import KeyState
from remote_server.store.bucket.index.store_clock import StoreClock
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import LIST_CHUNK, Failure, Listed
from remote_server.store.bucket.opening import SWEEP_EVERY_S
from remote_server.store.bucket.packs.object_names import (
    PARTITIONS,
    object_name,
    parse_name,
    tenant_prefix,
)
from remote_server.store.bucket.upkeep import sweep as sweep_module
from remote_server.store.bucket.upkeep.sweep import (
    LEAST_PACKS,
    UNFINISHED_S,
    Limits,
    one_round,
    sweep,
    too_many,
)

pytestmark = pytest.mark.real_time

DAY_S = 86_400.0


def listed(name: str, num_bytes: int, modified: float) -> Listed:
    return Listed(name, num_bytes, modified)


def test_what_is_too_old_goes_and_then_the_oldest_until_the_share_is_kept():
    found = [listed(f"{n}", 100, n * DAY_S) for n in range(10)]
    now = 10 * DAY_S
    assert too_many(found, Limits(), now) == []
    assert too_many(found, Limits(max_age_s=7.5 * DAY_S), now) == found[:3]
    assert too_many(found, Limits(num_bytes=450 * PARTITIONS), now) == found[:6]
    assert too_many(found, Limits(450 * PARTITIONS, 2.5 * DAY_S), now) == found[:8]
    assert too_many(found, Limits(num_bytes=150 * PARTITIONS), now, 3) == found[:6]


def test_a_round_has_each_partition_once_and_no_two_are_alike():
    for limits in (Limits(max_age_s=DAY_S), Limits(num_bytes=4 * PARTITIONS), Limits(1 << 60)):
        groups = one_round(limits, 1)
        assert sorted(number for group in groups for number in group) == [*range(PARTITIONS)]
    orders = [tuple(one_round(Limits(), 1)) for _ in range(4)]
    assert len({*orders}) == 4 and len(orders[0]) == PARTITIONS


def test_partitions_are_swept_together_where_one_has_no_room_for_packs():
    assert len(one_round(Limits(num_bytes=LEAST_PACKS * PARTITIONS), 1)) == PARTITIONS
    assert len(one_round(Limits(num_bytes=LEAST_PACKS * PARTITIONS - 1), 1)) == PARTITIONS // 2
    assert len(one_round(Limits(num_bytes=4), 1)) == 1


def test_a_budget_of_few_packs_keeps_what_it_has_room_for_and_what_went_is_forgotten(tmp_path):
    budget = 16 * 2 * ROW_BYTES
    with RealBucket(folder_url(tmp_path)) as bucket:
        fill(bucket, 64)
        for group in one_round(Limits(num_bytes=budget), ROW_BYTES):
            bucket.tier.swept(
                sweep(bucket.objects, tenant_prefix(""), group, Limits(num_bytes=budget))
            )
        sizes = {one.name: one.num_bytes for chunk in bucket.objects.listing("") for one in chunk}
        assert budget // 2 < sum(sizes.values()) <= budget + 3, "and the clock"
        assert bucket.tier.num_names == bucket.tier.stats().blocks == len(packs(bucket))


def test_a_sweep_shows_what_other_servers_have_written_and_removed(tmp_path):
    url = folder_url(tmp_path)
    with RealBucket(url) as ours, RealBucket(url) as other:
        fill(ours, 40)
        fill(other, 50)
        other.objects.remove(packs(other)[::2])
        for group in one_round(Limits(max_age_s=DAY_S), ROW_BYTES):
            ours.tier.swept(sweep(ours.objects, tenant_prefix(""), group, Limits(max_age_s=DAY_S)))
        assert ours.tier.num_names == len(packs(ours)) == 25
        for name in packs(ours):
            named = parse_name(name)
            assert ours.tier.is_known(named.namespace, named.key)


def fill(bucket: RealBucket, count: int) -> None:
    for n in range(count):
        bucket.put([key(n)], [block(n, ROW_BYTES)])


def packs(bucket: RealBucket) -> list[str]:
    return [name for name in bucket.names() if parse_name(name) is not None]


def test_objects_that_are_no_packs_are_left_alone(tmp_path):
    with RealBucket(folder_url(tmp_path)) as bucket:
        bucket.objects.put("v1/=/ns/00/readme.txt", memoryview(b"mine"))
        bucket.objects.put("elsewhere/00/aa", memoryview(b"mine"))
        os.utime(next(tmp_path.rglob("readme.txt")), (1, 1))
        swept = sweep(bucket.objects, tenant_prefix(""), range(1), Limits(max_age_s=DAY_S))
        assert swept.removed == [] and len(bucket.names()) == 3, "and the clock"


def test_what_a_killed_server_was_writing_into_a_folder_is_removed(tmp_path):
    """Each leaves up to a pack, which no list shows and no budget counts."""
    with RealBucket(folder_url(tmp_path)) as bucket:
        fill(bucket, 1)
        pack = next(tmp_path.rglob("v1/=/ns/*/*"))
        young, old = (pack.with_name(f"{pack.name}#{number}") for number in (1, 2))
        for path, age_s in ((young, UNFINISHED_S / 2), (old, UNFINISHED_S * 2)):
            path.write_bytes(b"half of a pack")
            os.utime(path, (time.time() - age_s,) * 2)
        number = int(pack.parent.name, 16)
        partition = range(number, number + 1)
        sweep(bucket.objects, tenant_prefix(""), partition, Limits(max_age_s=DAY_S))
        assert (pack.exists(), young.exists(), old.exists()) == (True, True, False)


def test_the_age_is_by_the_clock_of_the_store(tmp_path, monkeypatch):
    """A server whose clock is a year ahead removes nothing young."""
    with RealBucket(folder_url(tmp_path)) as bucket:
        fill(bucket, 4)
        monkeypatch.setattr(time, "time", lambda ours=time.time: ours() + 365 * DAY_S)
        for group in one_round(Limits(num_bytes=4), 1):
            swept = sweep(bucket.objects, tenant_prefix(""), group, Limits(max_age_s=DAY_S))
            assert swept.removed == []
        assert len(packs(bucket)) == 4


def test_a_pack_is_as_old_as_the_store_makes_it_whatever_this_machine_holds_for_the_time():
    now = 1000.0
    clock = StoreClock(lambda: now)
    assert clock.age_s(5e8) == 0.0, "nothing is too old before the store has shown a date"
    early = clock.date()
    clock.saw(5e8)
    clock.saw(5e8 - 7 * DAY_S)
    assert (clock.age_s(5e8), clock.age_s(5e8 - DAY_S)) == (0.0, DAY_S)
    now += 60.0
    assert clock.age_s(5e8) == 60.0
    clock.set(5e8 + DAY_S)
    assert (clock.age_s(5e8), clock.age_s(early)) == (DAY_S, 0.0)


def test_lookups_expire_packs_by_the_clock_of_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda ours=time.time: ours() + 365 * DAY_S)
    with RealBucket(folder_url(tmp_path)) as bucket:
        bucket.tier.listed({}, now=bucket.objects.time("v1/=/=clock"))
        fill(bucket, 4)
        bucket.tier.expire("ns", [key(n) for n in range(4)], max_age_s=DAY_S)
        assert bucket.tier.stats().blocks == 4
        bucket.tier.store_clock.set(bucket.tier.store_clock.date() + DAY_S)
        bucket.tier.expire("ns", [key(n) for n in range(3)], max_age_s=DAY_S)
        assert bucket.tier.stats().blocks == 1


def test_a_monotonic_clock_that_leaps_removes_nothing_from_the_bucket(tmp_path, context):
    """As of a machine that was moved: what this server held is too old for it, and the packs of
    all servers stay."""
    url, clock = folder_url(tmp_path), LeapingClock()
    limits = {"ttl_s": DAY_S, "bucket_bytes": 64 << 20}
    with bucket_server(url, clock, bucket_admit="all", **limits) as server:
        peer = hello(Peer(context, server.endpoint))
        (below,) = server.store.tier_stack.below
        peer.stats_once(lambda _: not below.tier.busy)  # the store's time is known
        peer.lookup(range(8), chain=chain_of(8))
        peer.put(range(8), length=ROW_BYTES, chain=chain_of(8))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 1)
        clock.leapt = 30.0 * DAY_S
        # Where a sweep was first, it has shown that the pack is not old: its header is being read.
        assert KeyState.READABLE not in peer.lookup(range(8), chain=chain_of(8)).states
        peer.stats_once(lambda s: s.counters["bucket_expired"] == 8)
        peer.stats_once(lambda s: s.counters["bucket_sweeps"] > 0)
        assert peer.stats().counters["bucket_swept_packs"] == 0
    with bucket_server(url) as other:
        peer = hello(Peer(context, other.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_names"] == 1)


@pytest.fixture
def two_tenants(tmp_path):
    """A server with tenants `a` and `b` is to be started on it."""
    tenancy = Tenancy(tmp_path / "keys")
    tenancy.write(a='memory = "4MiB"', b='memory = "4MiB"')
    yield tenancy
    tenancy.stop()
    tenancy.context.destroy(linger=0)


def test_tenants_have_an_equal_part_of_the_budget_each(tmp_path, two_tenants):
    """The budget is that of the whole bucket."""
    budget, clock = 16 * (ROW_BYTES + 4096), LeapingClock()
    settings = {"bucket": folder_url(tmp_path), "bucket_admit": "all", "bucket_bytes": budget}
    two_tenants.start(clock, **settings)
    for name in "ab":
        peer = hello(two_tenants.peer(name))
        peer.lookup(range(12))
        peer.put(range(12), length=ROW_BYTES)
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 12)
        clock.leapt += SWEEP_EVERY_S
        peer.stats_once(lambda s: s.counters["bucket_swept_packs"] == 4)


def test_packs_that_are_not_requested_expire_whatever_place_they_have(tmp_path):
    """Young packs that come first do not keep those behind them from the sweep of ages."""
    with RealBucket(folder_url(tmp_path)) as bucket:
        bucket.tier.store_clock.set(5e8)
        fill(bucket, 8)
        for number in range(6, 8):
            bucket.tier.peek("ns", key(number)).pack.modified = 5e8 - 2 * DAY_S
        for _ in range(4):
            bucket.tier.expire_some(max_age_s=DAY_S, at_most=2)
        assert bucket.tier.stats().blocks == 6
        assert bucket.tier.counters()["expired"] == 2
        bucket.tier.peek("ns", key(0)).pack.modified = 5e8 - 2 * DAY_S
        for _ in range(4):
            bucket.tier.expire_some(max_age_s=DAY_S, at_most=2)
        assert bucket.tier.stats().blocks == 5, "a second round"


def test_a_list_without_an_end_ends_the_sweep_and_removes_nothing(tmp_path, monkeypatch):
    class Endless(StoreObjects):
        def listing(self, prefix):
            name = object_name("", "ns", key(1))
            yield from repeat([Listed(name, 1, 0.0)] * LIST_CHUNK)

    monkeypatch.setattr(sweep_module, "MOST_PACKS", 10 * LIST_CHUNK)
    objects = Endless(folder_url(tmp_path))
    objects.put(object_name("", "ns", key(1)), memoryview(b"pack"))
    swept = sweep(objects, tenant_prefix(""), range(PARTITIONS), Limits(max_age_s=1.0))
    assert (swept.removed, swept.failure) == ([], Failure.OTHER)
