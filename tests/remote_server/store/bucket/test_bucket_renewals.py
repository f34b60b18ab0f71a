"""Packs that are read late in their life are written again, so that sweeps keep them."""

from typing import Any

import pytest
from bucket_helpers import FaultyObjects, RealBucket, bucket_server, folder_url
from test_bucket_faults import KEYS, NAME, write

from remote_server.store.bucket.objects.objects import Failure
from remote_server.store.bucket.packs.object_names import tenant_prefix
from remote_server.store.bucket.tier import BucketSettings
from remote_server.store.bucket.upkeep.renewals import LATE
from remote_server.store.bucket.upkeep.sweep import CLOCK, Limits

pytestmark = pytest.mark.real_time

DAY_S = 86_400.0
MAX_AGE_S = 7 * DAY_S


@pytest.fixture
def objects(tmp_path):
    return FaultyObjects(folder_url(tmp_path))


@pytest.fixture
def bucket(objects):
    """One pack that has just been written."""
    with RealBucket(
        objects=objects, settings=BucketSettings(limits=Limits(max_age_s=MAX_AGE_S))
    ) as bucket:
        bucket.tier.listed({}, now=objects.time(f"{tenant_prefix('')}/{CLOCK}"))
        write(bucket)
        yield bucket


def passes(bucket: RealBucket, seconds: float) -> None:
    bucket.tier.store_clock.set(bucket.tier.store_clock.date() + seconds)


def use(bucket: RealBucket) -> None:
    bucket.tier.touch_all("ns", KEYS)
    bucket.drain()


def age_s(bucket: RealBucket) -> float:
    return bucket.tier.age_s(bucket.tier.peek("ns", KEYS[0]))


def test_a_pack_that_is_used_late_in_its_life_gets_a_new_date_and_the_same_bytes(bucket, objects):
    before = objects.bytes_of(NAME)
    passes(bucket, LATE * MAX_AGE_S - 60)
    use(bucket)
    assert bucket.tier.counters()["renewed"] == 0, "not before"
    passes(bucket, 120)
    use(bucket)
    assert bucket.tier.counters()["renewed"] == 1
    assert age_s(bucket) < 1.0 and objects.bytes_of(NAME) == before
    use(bucket)
    assert bucket.tier.counters()["renewed"] == 1


def test_a_pack_without_a_last_day_is_never_renewed(objects):
    with RealBucket(objects=objects) as bucket:
        passes(bucket, 1000 * MAX_AGE_S)
        use(bucket)
        assert bucket.tier.counters()["renewed"] == 0


def test_a_damaged_pack_is_not_made_young(bucket, objects):
    row = bucket.tier.peek("ns", KEYS[3])
    objects.flip(NAME, row.offset + 5)
    passes(bucket, MAX_AGE_S)
    use(bucket)
    counters = bucket.tier.counters()
    assert (counters["renewed"], counters["renew_failed"]) == (0, 1)
    assert counters["failed_other"] == 0, "the store has done nothing wrong"
    assert age_s(bucket) >= MAX_AGE_S


def test_a_renewal_that_the_store_refuses_is_counted_and_tried_by_the_next_use(bucket, objects):
    passes(bucket, MAX_AGE_S)
    objects.fail("put", Failure.UNREACHABLE)
    use(bucket)
    objects.fail("put", None)
    assert bucket.tier.counters()["renew_failed"] == 1
    assert bucket.tier.counters()["failed_unreachable"] == 1
    use(bucket)
    assert bucket.tier.counters()["renewed"] == 1


def test_a_pack_that_was_cleared_while_it_was_renewed_is_gone(bucket):
    passes(bucket, MAX_AGE_S)
    bucket.tier.touch_all("ns", KEYS)
    bucket.tier.clear("ns")
    bucket.drain()
    assert NAME not in bucket.names()


def test_a_tenant_with_a_ttl_renews_nothing(tmp_path):
    """Its blocks go when they are old, used or not."""
    for ttl_s, expected in ((0.0, LATE), (3600.0, 0.0)):
        with bucket_server(folder_url(tmp_path), ttl_s=ttl_s) as server:
            tier: Any = server.store.tier_stack.tiers[-1]
            assert tier._renewals._late_s == expected * MAX_AGE_S
