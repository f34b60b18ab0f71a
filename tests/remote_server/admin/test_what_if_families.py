"""Metrics of what other sizes would find, and of why tokens were not found."""

import pytest
from metrics_helpers import WHAT_IF, a_snapshot
from msgspec.structs import replace

from remote_server.admin.exposition import families
from remote_server.server.reports.snapshot import Snapshot


def shown(snapshot: Snapshot, name: str) -> dict[tuple[str, ...], float]:
    (family,) = [one for one in families(snapshot, {}) if one.name == f"kvferry_server_{name}"]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def test_each_size_of_each_tier_has_a_share_by_the_rule_in_force_and_by_lru():
    ratios = shown(a_snapshot(what_if={"one": WHAT_IF}), "what_if_found_ratio")
    assert len(ratios) == 2 * 2 * len(WHAT_IF.times)
    assert ratios["one", "memory", "2", "in_force"] == 0.375
    assert ratios["one", "memory", "2", "lru"] == 0.25
    assert ratios["one", "disk", "0.125", "in_force"] == 0.25


def test_the_shares_found_in_each_tier_and_missed_for_each_reason_are_one():
    snapshot = a_snapshot()
    found, missed = shown(snapshot, "found_tokens_ratio"), shown(snapshot, "missed_tokens_ratio")
    assert found == {("", "memory"): 0.25, ("", "disk"): 0.25}
    assert missed[("", "evicted_60")] == 0.125
    assert sum(found.values()) + sum(missed.values()) == pytest.approx(1.0)


def test_the_memory_of_the_models_and_what_the_shares_are_of_are_shown():
    snapshot = a_snapshot()
    names = ("what_if_asked_tokens", "what_if_bytes")
    assert [shown(snapshot, name) for name in names] == [{("",): 1e6}, {("",): 2 << 20}]


def test_there_are_no_shares_before_the_first_request_but_the_memory_is_known():
    snapshot = a_snapshot(what_if={"": replace(WHAT_IF, total=replace(WHAT_IF.total, asked=0))})
    for name in ("what_if_found_ratio", "found_tokens_ratio", "missed_tokens_ratio"):
        assert shown(snapshot, name) == {}
    assert shown(snapshot, "what_if_asked_tokens") == {("",): 0}
    assert shown(snapshot, "what_if_bytes") == {("",): 2 << 20}
