"""The model of a fleet: where rows go, what a lost server takes with it, and what a join finds."""

import random
from collections.abc import Sequence
from itertools import takewhile

import pytest
from synthetic_trace import write
from test_trace_replay import prompts

from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache import test_placement as placement_benchmark
from benchmarks.remote_kv_cache.replay.caches.optimum import without_limit
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.fleet.model import (
    FleetCounts,
    FleetModel,
    Homes,
    key_of,
    replay,
    runs_of,
)
from benchmarks.remote_kv_cache.replay.requests import recorded
from remote_server.store.eviction.lru import LRU
from remote_server.traces import Request

FOUR = ("a", "b", "c", "d")
RUNS_OF_12 = [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]
"""Of the first 12 blocks of 512 tokens: runs begin at tokens 0, 1,024, 2,048 and 4,096."""


def by_anchor(names: Sequence[str], namespace: str, anchor: bytes) -> tuple[int, int]:
    """Homes in turn: an anchor's number is that of its block, and consecutive names are homes."""
    first = int.from_bytes(anchor[:32], "big") % len(names)
    return first, (first + 1) % len(names)


def hashed(names: Sequence[str], namespace: str, anchor: bytes) -> tuple[int, int]:
    order = sorted(
        range(len(names)),
        key=lambda place: random.Random(f"{names[place]} {namespace} {anchor.hex()}").random(),
    )
    return order[0], order[min(1, len(order) - 1)]


def fleet_for(
    requests: Sequence[Request], names: Sequence[str] = FOUR, homes: Homes = hashed,
    memory: int = 10_000, disk: int = 0, **ways: bool,
) -> FleetModel:  # fmt: skip
    return FleetModel(
        names, "tests", runs_of(requests), homes, lambda: ServerModel(memory, disk, LRU), **ways
    )


def conversations(tmp_path, requests: int = 300) -> tuple[Request, ...]:
    return recorded.read(write(tmp_path / "trace.jsonl", requests))


def after(requests: Sequence[Request], fleet: FleetModel) -> FleetCounts:
    return replay(requests, fleet)


def test_runs_double_and_their_anchor_is_their_first_row():
    (request,) = prompts("abcdefghijkl")
    runs = runs_of([request])
    assert [runs[key_of(block)].number for block in request.blocks] == RUNS_OF_12
    first = {number: key_of(RUNS_OF_12.index(number)) for number in RUNS_OF_12}
    assert all(run.anchor == first[run.number] for run in runs.values())
    assert runs_of(prompts("abcdefghijklmnopqrs"))[key_of(15)].of_head
    assert not runs_of(prompts("abcdefghijklmnopqrs"))[key_of(16)].of_head


def test_a_prompt_asks_the_homes_of_its_runs_and_no_other_server():
    requests = prompts("ab", "abcd", "abcdefghijkl")
    fleet = fleet_for(requests, [*FOUR, "e", "f", "g", "h"], by_anchor)
    # homes of anchors 0, 2, 4 and 8: (0, 1), (2, 3), (4, 5) and (0, 1)
    assert after(requests, fleet).asked == [2, 4, 6]
    assert after(requests, fleet_for(requests, ["alone"])).asked == [1, 1, 1]


def test_a_row_goes_to_the_home_that_has_the_beginning_of_its_run():
    requests = prompts("a", "xy", "ab", "ac", "ad")
    whole = fleet_for(requests, "ab", by_anchor)
    after(requests, whole)
    assert {tuple(whole.holders(key_of(block))) for block in (0, 3, 4, 5)} == {("a",)}
    evenly = fleet_for(requests, "ab", by_anchor, keeps_runs_whole=False)
    after(requests, evenly)
    assert [len(server.memory) for server in evenly.servers.values()] == [3, 3]


def test_what_a_lost_server_costs_is_counted_from_its_first_block_on():
    requests = prompts("abcdefgh", "abcdefgh")
    fleet = fleet_for(requests, FOUR, by_anchor)
    counts = after(requests, fleet)
    # runs of 2, 2 and 4 blocks at (0, 1), (2, 3), (0, 1): the third goes to the emptier one
    assert counts.reusable == 8
    assert counts.lost == {"a": 8, "c": 6, "b": 4}
    assert counts.usable(4) == 1 - 18 / 4 / 8


@pytest.mark.parametrize("number", [1, 2, 5])
def test_the_usable_part_is_that_of_prefixes_which_end_at_the_lost_server(number, tmp_path):
    requests = conversations(tmp_path, 150)
    names = [f"s{place}" for place in range(number)]
    fleet = fleet_for(requests, names)
    usable = 0
    for request in requests:
        holders = [fleet.holders(key_of(block)) for block in request.blocks]
        found = len([*takewhile(bool, holders)])
        for gone in names:
            usable += len([*takewhile(lambda held, gone=gone: {*held} - {gone}, holders)])
        fleet.get([key_of(block) for block in request.blocks[:found]])
        fleet.put([key_of(block) for block in request.blocks[found:]])
    counts = after(requests, fleet_for(requests, names))
    assert counts.reusable == without_limit(requests)
    assert counts.usable(number) == pytest.approx(usable / number / counts.reusable)
    assert (counts.usable(number) == 0) == (number == 1)


def test_with_the_head_on_both_homes_no_single_loss_cuts_it(tmp_path):
    requests = conversations(tmp_path)
    short = [request._replace(blocks=request.blocks[:16]) for request in requests]
    fleet = fleet_for(short, copies_head=True)
    assert after(short, fleet).usable(4) == 1.0
    assert all(len(fleet.holders(key)) == 2 for key in runs_of(short))
    longer = fleet_for(requests, copies_head=True)
    assert after(requests, longer).usable(4) > after(requests, fleet_for(requests)).usable(4)


def test_after_a_loss_rows_go_to_the_other_home_and_are_found_there(tmp_path):
    requests = conversations(tmp_path)
    fleet = fleet_for(requests)
    counts = replay(requests, fleet, events={150: lambda each: each.lose("a")})
    assert counts.reusable < without_limit(requests)
    everything = sum(len(request.blocks) for request in requests)
    assert after(requests, fleet).reusable < everything  # what no prompt has computed since
    assert after(requests, fleet).reusable == everything


@pytest.mark.parametrize("with_disk", [True, False])
def test_a_server_that_returns_has_lost_what_was_not_on_its_disk(with_disk, tmp_path):
    requests = conversations(tmp_path)

    def restart(fleet: FleetModel) -> None:
        fleet.lose("a")
        fleet.bring_back("a", with_disk=with_disk)

    fleet = fleet_for(requests, disk=10_000)
    counts = replay(requests, fleet, events={150: restart})
    assert (counts.reusable == without_limit(requests)) == with_disk


@pytest.mark.parametrize("ask_previous", [True, False])
def test_a_join_loses_nothing_while_the_homes_by_the_list_before_are_asked(ask_previous, tmp_path):
    requests = conversations(tmp_path)
    fleet = fleet_for(requests)
    join = {150: lambda each: each.change_list([*FOUR, "e"], ask_previous=ask_previous)}
    counts = replay(requests, fleet, events=join)
    assert (counts.reusable == without_limit(requests)) == ask_previous
    assert len(fleet.servers["e"].memory) > 0
    assert max(counts.asked[150:]) > max(counts.asked[:150]) or not ask_previous


def test_the_command_prints_and_records_each_number_of_servers(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", 200)
    status = placement_benchmark.main([
        "--trace", str(trace), "--sessions", "10", "--servers", "1,4", "--join",
        "--json", str(tmp_path / "record.json"),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert status == 0
    figures = {each.name: each.values for each in Record.read(tmp_path / "record.json").figures}
    assert len(figures) == 2 * 3 * 2
    assert all(name in printed for name in figures)
    one, four = figures["chat, whole runs: 1 server"], figures["chat, whole runs: 4 servers"]
    assert (one["asked p99"], one["usable, %"], one["stored"]) == (1, 0, 1)
    assert 0 < four["usable, %"] < figures["chat, head twice: 4 servers"]["usable, %"]
    assert four["found, %"] == four["after a join, %"] == one["found, %"]
    assert four["after a join, new list alone, %"] < four["found, %"]


def test_a_file_that_is_no_trace_is_refused(tmp_path, capsys):
    (tmp_path / "none").write_text("{")
    assert placement_benchmark.main(["--trace", str(tmp_path / "none")]) == 2
    assert "line 1" in capsys.readouterr().err
