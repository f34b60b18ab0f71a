"""Sums of statistics: shared buckets, rates over restarts, engines of several servers."""

from collections.abc import Mapping

from remote_server.cli.figures.stats_lines import contents
from remote_server.cli.figures.sums import sum_of
from remote_server.protocol import NamespaceStats, StatsReply, TierShare, TierStats


def reply(epoch: str, uptime_s: float = 10.0, **counters: int) -> StatsReply:
    tier = TierStats(budget_bytes=100, used_bytes=10, blocks=1, pending=0, pinned=0, free_slabs=0)
    return StatsReply(
        request_id=1, epoch=epoch, server="s", uptime_s=uptime_s, namespaces={}, counters=counters,
        tiers={"memory": tier, "bucket": tier},
    )  # fmt: skip


def with_engine(reply_of: StatsReply, engine: str, fingerprint: Mapping[str, str]) -> StatsReply:
    own = NamespaceStats(
        block_bytes=1, client=engine, fingerprint=dict(fingerprint), engines={engine: {}},
        tiers={"memory": TierShare(blocks=2, used_bytes=2), "bucket": TierShare(used_bytes=7)},
    )  # fmt: skip
    reply_of.namespaces["m"] = own
    return reply_of


def test_tiers_add_up_and_a_bucket_that_all_may_share_counts_once():
    total = sum_of({"a": reply("1"), "b": reply("2"), "c": reply("3")})
    assert (total.tiers["memory"].used_bytes, total.tiers["memory"].budget_bytes) == (30, 300)
    assert (total.tiers["bucket"].used_bytes, total.tiers["bucket"].budget_bytes) == (10, 100)


def test_a_namespace_has_the_engines_of_all_servers_as_differences_from_one_fingerprint():
    total = sum_of({
        "a": with_engine(reply("1"), "first", {"dtype": "half", "seed": "0"}),
        "b": with_engine(reply("2"), "second", {"dtype": "half", "rank": "1"}),
    }).namespaces["m"]  # fmt: skip
    assert total.fingerprint == {"dtype": "half", "seed": "0"}
    assert total.engines == {"first": {}, "second": {"seed": "", "rank": "1"}}
    assert total.share("memory").blocks == 4 and total.share("bucket").used_bytes == 7


def test_rates_are_shown_only_between_the_same_boots_of_the_same_servers():
    before = sum_of({"a": reply("1", bytes_in=0), "b": reply("2", bytes_in=0)})
    a, b = reply("1", 12.0, bytes_in=2 << 20), reply("2", 12.0, bytes_in=2 << 20)
    assert "4.0 MiB, 2.0 MiB/s" in "\n".join(contents(sum_of({"a": a, "b": b}), before))
    again = reply("3", 1.0, bytes_in=2 << 20)
    assert "/s" not in "\n".join(contents(sum_of({"a": a, "b": again}), before))
    assert "/s" not in "\n".join(contents(sum_of({"a": a}), before))
