"""Dates that a store, or a proxy before it, gets wrong."""

import time

import pytest
from client_helpers import NAMESPACE, key
from wild_store import wild_store

from remote_server.store.bucket.objects.client import MOST_AHEAD_S, StoreObjects
from remote_server.store.bucket.packs.object_names import PARTITIONS, object_name, tenant_prefix
from remote_server.store.bucket.upkeep.sweep import Limits, sweep

pytestmark = pytest.mark.real_time

YEAR_S = 365 * 86_400.0


def test_a_store_whose_clock_jumps_loses_no_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list has honest dates, of 2024."""
    with wild_store() as (store, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects = StoreObjects("s3://blocks/kv")
        packs = [object_name("", NAMESPACE, key(number)) for number in range(3)]
        for pack in packs:
            objects.put(pack, memoryview(b"pack"))
        store.date = "Fri, 31 Dec 9999 23:59:59 GMT"
        limits = Limits(max_age_s=1000 * YEAR_S)
        swept = sweep(objects, tenant_prefix(""), range(PARTITIONS), limits)
        assert (swept.failure, swept.removed) == (None, [])
        assert abs(swept.now - time.time() - MOST_AHEAD_S) < 3600
        assert {*store.objects} >= {f"kv/{pack}" for pack in packs}
