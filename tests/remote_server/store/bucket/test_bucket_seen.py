"""What people see of the bucket: its calls, its state, its log, and where a block is in it."""

import json
import logging
import threading
from types import SimpleNamespace

import pytest
from bucket_helpers import (
    ROW_BYTES,
    ROW_TOKENS,
    bucket_server,
    chain_of,
    folder_url,
    hello,
    write_packs,
)
from metrics_helpers import a_bucket
from msgspec.structs import replace
from wire_peer import Peer, key

from remote_server.cli.__main__ import main
from remote_server.cli.figures.stats_lines import contents
from remote_server.protocol import StatsReply, TierStats
from remote_server.server.reports.bucket_calls import KINDS, CallMeter, MeteredObjects, all_tenants
from remote_server.store.bucket.objects.availability import Availability
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.stack.admission import WriteBudget

pytestmark = pytest.mark.real_time

ROWS = 16


class Ticking:
    """A clock that goes on by a quarter of a second each time it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.25
        return self.now


WRITER = SimpleNamespace(
    tier=SimpleNamespace(num_names=7, availability=Availability(lambda: 0.0)),
    budget=WriteBudget(0, 0, 0),
    num_packs_waiting=2,
)
"""The parts of a `PackWriter` whose state is shown."""


@pytest.fixture
def meter():
    return CallMeter(Ticking())


@pytest.fixture
def objects(meter, tmp_path):
    return MeteredObjects(StoreObjects(folder_url(tmp_path)), meter)


def results(meter) -> dict[str, dict[str, int]]:
    return {kind: one.results for kind, one in meter.stats(WRITER).calls.items() if one.results}


# ── calls ────────────────────────────────────────────────────────────────────────────────


def test_every_call_is_counted_by_kind_and_result_with_its_bytes_and_its_time(objects, meter):
    assert objects.put("a/b", memoryview(b"12345"))
    assert not objects.put("a/b", memoryview(b"12345"))
    objects.read("a/b", 1, 4)
    objects.read_head("a/b", 4)
    with pytest.raises(BucketError):
        objects.read_head("a/c", 4)
    assert objects.size_of("a/c") is None
    assert [len(chunk) for chunk in objects.listing("a")] == [1]
    assert [*objects.listing("z")] == []
    objects.folders("a")
    objects.remove([])
    objects.remove(["a/b"])
    assert results(meter) == {
        "put": {"ok": 1, "existed": 1},
        "get": {"ok": 1},
        "header": {"ok": 1, "absent": 1},
        "head": {"absent": 1},
        "list": {"ok": 3},
        "delete": {"ok": 1},
    }
    calls = meter.stats(WRITER).calls
    assert {kind: calls[kind].num_bytes for kind in KINDS} == {
        "put": 5, "get": 3, "header": 4, "head": 0, "list": 0, "delete": 0
    }  # fmt: skip
    assert calls["get"].times.sum_s == 0.25 and calls["get"].times.count == 1
    assert meter.stats(WRITER).last_failure == "", "what is absent is no failure"


def test_every_way_to_call_the_store_is_measured():
    calls = {name for name, it in vars(Objects).items() if callable(it) and name[0] != "_"}
    others = {"time", "close"}  # a put and a header; none
    assert calls - others == calls & vars(MeteredObjects).keys()


def test_a_failure_is_counted_by_its_reason_and_its_words_are_kept(objects, meter):
    objects.put("a", memoryview(b"12345"))
    with pytest.raises(BucketError):
        objects.read("a", 2, 9)
    assert results(meter)["get"] == {"short": 1}
    assert meter.stats(WRITER).last_failure == "get: short: 3 of 7 bytes of a"


def test_threads_time_and_the_loop_counts(objects, meter):
    thread = threading.Thread(target=objects.put, args=("a", memoryview(b"1")))
    thread.start()
    thread.join()
    assert not meter._results["put"], "only the loop counts"
    meter.count()
    assert results(meter) == {"put": {"ok": 1}}


def test_the_bucket_of_all_tenants_has_the_sums_and_the_latest_failure():
    one, other = a_bucket(paused_s=3.0, timeout=2), a_bucket()
    both = all_tenants([one, None, other])
    assert both.names == 2 * one.names and both.packs_waiting == 2 * one.packs_waiting
    assert both.calls["get"].results == {"ok": 36, "timeout": 2}
    assert both.calls["get"].times.counts == [2] * 18
    assert (both.paused_s, both.last_failure) == (3.0, one.last_failure)
    assert all_tenants([None, None]) is None


# ── the log ──────────────────────────────────────────────────────────────────────────────


def test_a_store_that_is_away_has_two_lines_in_the_log_however_often_it_fails(caplog):
    now = [100.0]
    available = Availability(lambda: now[0], "s3://b/p")
    with caplog.at_level(logging.INFO):
        for _ in range(20):
            available.failed(Failure.TIMEOUT)
            if not available.is_open:
                available.refuse()
            now[0] += 1.5
        assert available.paused_s == 20 * 1.5 - 2 * 1.5, "from the third failure on"
        refused = available.num_refused
        now[0] += Availability.LONGEST_PAUSE_S
        for _ in range(3):
            available.succeeded()
    away, back = caplog.messages
    assert "s3://b/p fails (timeout)" in away
    assert f"s3://b/p answers again after 87.0 s; {refused} lookups" in back
    assert refused > 5 and available.paused_s == 0.0


# ── a server ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def filled(tmp_path, context):
    """A server that has written two packs, and a peer."""
    disk = {"disk": str(tmp_path / "disk"), "disk_bytes": 64 << 20, "disk_admit": "all"}
    with bucket_server(folder_url(tmp_path), **disk) as server:
        peer = hello(Peer(context, server.endpoint))
        peer.put(range(ROWS), length=ROW_BYTES, chain=chain_of(ROWS))
        peer.lookup(range(ROWS), chain=chain_of(ROWS))
        peer.stats_once(lambda s: s.counters["bucket_packs_written"] == 2)
        yield server, peer


def test_a_server_shows_the_calls_of_its_bucket_to_its_clients(filled):
    _, peer = filled
    bucket = peer.stats_once(
        lambda s: s.bucket.names == 2 and s.bucket.calls["put"].results.get("ok", 0) >= 3
    ).bucket
    assert bucket.calls["put"].num_bytes > ROWS * ROW_BYTES
    assert bucket.calls["list"].results == {"ok": 1}
    assert bucket.paused_s == 0.0 and bucket.last_failure == ""
    assert bucket.packs_waiting == 0
    assert 0 < bucket.writable_bytes <= 60 * (50 << 20), "a minute of the rate at most"


def test_why_shows_the_pack_of_a_block_and_its_age(filled, capsys):
    server, peer = filled
    peer.stats_once(lambda s: s.counters["disk_demoted"] == ROWS)
    named = key(3).hex(), "--server", server.endpoint
    assert main(["why", *named]) == 0
    first, memory, disk, bucket = capsys.readouterr().out.splitlines()
    assert first.startswith(f"ns: tokens {3 * ROW_TOKENS} to {4 * ROW_TOKENS} of group 0")
    assert memory == "  memory"
    assert disk.startswith("  disk, for 0 min 0 s: segment-00000001, slot ")
    assert bucket.startswith("  bucket, for ")
    assert f"{key(7).hex()}, one of 8 rows" in bucket and ": v1/=/ns/" in bucket
    assert main(["why", *named, "--json"]) == 0
    (fact,) = json.loads(capsys.readouterr().out)
    assert [copy["tier"] for copy in fact["copies"]] == ["memory", "disk", "bucket"]


def test_why_waits_for_the_header_of_a_pack_that_is_only_listed(tmp_path, context, capsys):
    url = folder_url(tmp_path)
    write_packs(url, context, 1)
    with bucket_server(url) as second:
        peer = hello(Peer(context, second.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_names"] == 1)
        assert main(["why", key(7).hex(), "--server", second.endpoint]) == 0
        assert "  bucket, for " in capsys.readouterr().out


# ── kvferry stats ────────────────────────────────────────────────────────────────────────

TIER = TierStats(
    budget_bytes=0, used_bytes=1 << 30, blocks=16, pending=0, pinned=0, free_slabs=0
)  # fmt: skip


def reply(bucket, uptime_s: float = 10.0, tier: TierStats = TIER, **counters: int) -> StatsReply:
    return StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=uptime_s, tiers={"bucket": tier},
        namespaces={}, counters=counters, bucket=bucket,
    )  # fmt: skip


def test_stats_have_lines_of_the_bucket_and_none_without_one():
    lines = "\n".join(contents(reply(a_bucket(timeout=2), get_hit=200, hits_bucket=25)))
    assert "bucket     answers\n" in lines
    assert "1,200 packs known, 3 wait to be written; 1.0 MiB may be written now" in lines
    assert "12.5 % of the blocks that were got came from it" in lines
    (get,) = [line.split() for line in lines.splitlines() if line.startswith("get ")]
    assert get == ["get", "20", "2", "16.0", "MiB", "25.0", "ms", "10.00", "s"]
    assert "no limit" in lines, "it has no budget"
    shown = contents(reply(a_bucket(), tier=replace(TIER, budget_bytes=50 << 40)))
    assert any("50.0 TiB" in line for line in shown)
    assert "bucket" not in "\n".join(contents(reply(None))).replace("bucket  ", "")


def test_stats_of_a_paused_bucket_show_for_how_long_and_the_words_of_the_store():
    lines = contents(reply(a_bucket(paused_s=75.0)))
    assert "bucket     left alone for 1 min 15 s, because its calls fail" in lines
    assert f"{'':<10} last failure, 1 min 15 s ago: get: timeout: no answer" in lines


def test_stats_watched_show_calls_and_bytes_per_second():
    before, now = a_bucket(), all_tenants([a_bucket(), a_bucket()])
    lines = contents(reply(now, uptime_s=12.0), reply(before))
    (get,) = [line.split() for line in lines if line.startswith("get ")]
    assert get[:5] == ["get", "9.0", "0", "8.0", "MiB/s"]
