"""Removal from the bucket by servers that do not know of each other."""

import time

from bucket_helpers import ROW_BYTES, RealBucket, folder_url
from wire_peer import block, key

from remote_server import protocol
from remote_server.store.bucket.objects import Listed
from remote_server.store.bucket.packs import parse_name, tenant_prefix
from remote_server.store.bucket.store_clock import StoreClock
from remote_server.store.bucket.sweep import PARTITIONS, Limits, sweep_one, too_many

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


def fill(bucket: RealBucket, count: int, namespace: str = "ns") -> None:
    keys = [key(n) for n in range(count)]
    data = [block(n, ROW_BYTES) for n in range(count)]
    sums = protocol.checksums(namespace, keys, data)
    for n in range(count):
        rows = bucket.tier.begin_puts(namespace, [keys[n]], ROW_BYTES, [ROW_BYTES], [sums[n]])
        bucket.tier.write(rows, [memoryview(data[n])], lambda _: None)
        bucket.drain()


def packs(bucket: RealBucket) -> list[str]:
    return [name for name in bucket.names() if parse_name(name) is not None]


def test_all_partitions_swept_leave_the_budget_and_what_went_is_forgotten(tmp_path):
    budget = 4 * PARTITIONS * ROW_BYTES // 3
    with RealBucket(folder_url(tmp_path)) as bucket:
        fill(bucket, 64)
        fill(bucket, 64, "other")
        for number in range(PARTITIONS):
            swept = sweep_one(
                bucket.objects, tenant_prefix(""), f"{number:02x}", Limits(num_bytes=budget)
            )
            assert swept.num_bytes <= budget // PARTITIONS
            bucket.tier.swept(swept)
        left = packs(bucket)
        assert left
        assert bucket.tier.num_names == len(left)
        assert bucket.tier.stats().blocks == len(left)


def test_objects_that_are_no_packs_are_left_alone(tmp_path):
    with RealBucket(folder_url(tmp_path)) as bucket:
        bucket.objects.put("v1/=/ns/00/readme.txt", memoryview(b"mine"))
        bucket.objects.put("elsewhere/00/aa", memoryview(b"mine"))
        time.sleep(0.01)
        swept = sweep_one(bucket.objects, tenant_prefix(""), "00", Limits(max_age_s=0.001))
        assert swept.removed == [] and len(bucket.names()) == 3, "and the clock"


def test_the_age_is_by_the_clock_of_the_store(tmp_path, monkeypatch):
    """A server whose clock is a year ahead removes nothing young."""
    with RealBucket(folder_url(tmp_path)) as bucket:
        fill(bucket, 4)
        monkeypatch.setattr(time, "time", lambda ours=time.time: ours() + 365 * DAY_S)
        for number in range(PARTITIONS):
            swept = sweep_one(
                bucket.objects, tenant_prefix(""), f"{number:02x}", Limits(max_age_s=DAY_S)
            )
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
