"""The sweep: what a conversation asks for, what a slow storage does to it, what is concluded."""

import importlib.util
import json
import re
import shutil
import subprocess
from concurrent.futures import Future
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.record import Record
from benchmarks.store_sweep import (
    conversation,
    interactive,
    network,
    page,
    printed,
    source,
    spare,
    sweep,
)
from benchmarks.store_sweep.__main__ import main
from benchmarks.store_sweep.figures import as_figure, read_record
from benchmarks.store_sweep.operating import (
    best_within,
    operating_points,
    servers_for,
    slas_for,
    within_slas,
)
from benchmarks.store_sweep.points import (
    Percentiles,
    Point,
    ReadSplit,
    Result,
    as_csv,
    in_rounds,
    read_csv,
)
from benchmarks.store_sweep.slow_server import Channels, SlowGets
from benchmarks.store_sweep.talkers import Talk, Talker, add_split, pauses
from remote_server import protocol
from remote_server.client import GetTimes
from remote_server.errors import ConfigError
from remote_server.server.config import ServerConfig
from remote_server.server.request_times import RequestTimes
from remote_server.server.server import Server
from remote_server.sizes import MiB

# ── a conversation ───────────────────────────────────────────────────────────────────────────


def test_a_conversation_is_7_lookups_6_reads_and_3_writes_booked_as_1152_tokens():
    assert (conversation.LOOKUPS, conversation.READS, conversation.WRITES) == (7, 6, 3)
    assert conversation.TOKENS_BOOKED == 1152
    assert [turn.known for turn in conversation.TURNS] == [0, 1, 1, 1, 2, 2, 3]
    assert [turn.full - turn.known for turn in conversation.TURNS] == [1, 0, 0, 1, 0, 1, 0]
    assert conversation.BLOCKS_MOVED == 13


def test_a_key_depends_on_all_that_came_before_it():
    keys = [
        key
        for speaker, number in ((b"a", 0), (b"a", 1), (b"b", 0))
        for key in conversation.keys_of(speaker, number)
    ]
    assert len(set(keys)) == len(keys) == 3 * conversation.BLOCKS
    assert {len(key) for key in keys} == {36}
    assert keys[:3] == conversation.keys_of(b"a", 0)


# ── points ───────────────────────────────────────────────────────────────────────────────────


def test_up_to_eight_clients_are_processes_and_beyond_that_processes_have_more():
    parsed = [
        Point.parse(text) for text in ["1", "2", "4", "6", "8", "16", "32", "64", "80", "3x5"]
    ]
    assert [str(point) for point in parsed] == [
        "1x1", "2x1", "4x1", "6x1", "8x1", "8x2", "8x4", "8x8", "8x10", "3x5"
    ]  # fmt: skip
    for wrong in ("9", "0", "x2", "2x0", "-1", "two"):
        with pytest.raises(ConfigError, match="concurrency"):
            Point.parse(wrong)


def test_each_round_begins_at_another_point():
    one, two, four = (Point.of(concurrency) for concurrency in (1, 2, 4))
    assert [*in_rounds([one, two, four], 2)] == [
        (0, one), (0, two), (0, four), (1, two), (1, four), (1, one)
    ]  # fmt: skip
    assert [*in_rounds([one], 2)] == [(0, one), (1, one)]


def talk(*lookups: float, conversations: int = 1, seconds: float = 1.0) -> dict:
    return {
        "lookups": list(lookups), "reads": [1.0], "writes": [1.0],
        "conversations": conversations, "seconds": seconds, "errors": [],
        "split_ms": [0.0] * 6, "timed": 0, "apart": 0,
    }  # fmt: skip


def one_round(*talks: dict, cpu: float | None = None, server: float | None = None) -> sweep.Round:
    return sweep.Round(list(talks), cpu, server)


def pooled(point: Point, rounds: list[sweep.Round]) -> Result:
    return sweep.pooled(point, rounds, 1000, 0.5)


def test_percentiles_are_of_all_samples_and_not_means_of_each_clients():
    fast, slow = talk(*[1.0] * 99), talk(*[100.0] * 99)
    for rounds in ([one_round(fast, slow)], [one_round(fast), one_round(slow)]):
        result = pooled(Point(2, 1), rounds)
        assert (result.lookup.p50, result.lookup.p90) == (1.0, 100.0)  # a mean of both: 50.5
    outlier = pooled(Point(2, 1), [one_round(talk(*[1.0] * 500), talk(*[1.0] * 499, 9.0))])
    assert (outlier.lookup.p99, outlier.lookup.p100) == (1.0, 9.0)


def test_rates_of_clients_add_up_and_those_of_rounds_are_averaged():
    both = one_round(talk(conversations=10, seconds=2.0), talk(conversations=6, seconds=1.5))
    result = pooled(Point(1, 2), [both])
    assert result.tps == 9.0
    assert result.tokens_per_s == 9 * 1152
    slower = one_round(talk(conversations=10, seconds=4.0), talk(conversations=5, seconds=2.0))
    assert pooled(Point(1, 2), [both, slower]).tps == 7.0


def test_cpu_use_is_the_mean_of_the_rounds_in_which_it_was_known():
    rounds = [one_round(talk(1.0), cpu=20.0, server=4.0), one_round(talk(1.0)),
              one_round(talk(1.0), cpu=30.0, server=6.0)]  # fmt: skip
    result = pooled(Point(1, 1), rounds)
    assert (result.cpu_percent, result.server_percent) == (25.0, 5.0)
    unknown = pooled(Point(1, 1), [one_round(talk(1.0))])
    assert (unknown.cpu_percent, unknown.server_percent) == (None, None)


def test_an_error_of_any_client_in_any_round_is_an_error_of_the_point():
    failed = talk(1.0) | {"errors": ["late"]}
    rounds = [one_round(talk(1.0), failed), one_round(failed, failed)]
    assert pooled(Point(2, 1), rounds).errors == 3


def test_the_split_of_a_point_is_of_all_timed_reads_and_its_bytes_are_of_all_blocks():
    first = talk(1.0) | {"split_ms": [1.0, 2.0, 3.0, 4.0, 5.0, 16.0], "timed": 1, "apart": 1}
    second = talk(1.0) | {"split_ms": [3.0, 0.0, 3.0, 2.0, 3.0, 11.0], "timed": 3, "apart": 0}
    result = pooled(Point(2, 1), [one_round(first), one_round(second)])
    assert result.split == ReadSplit(1.0, 0.5, 1.5, 1.5, 2.0, 6.75, 25.0)
    assert result.split.parts["storage"] == 1.5
    assert result.moved_gb_per_s == pytest.approx(13 * 1000 / 1e9)
    assert result.network_percent == pytest.approx(100 * 13e-6 / 0.5)
    assert pooled(Point(1, 1), [one_round(talk(1.0))]).split is None


def test_a_read_ends_when_its_caller_goes_on_and_parts_that_do_not_sum_up_are_counted():
    talk = Talk(reads=[36.0])
    times = GetTimes(10.0, 10.035, 0.001, 0.005, 0.005, 0.020, 0.004)
    add_split(talk, times, now=10.036)
    assert talk.split_ms == pytest.approx([1.0, 5.0, 5.0, 20.0, 5.0, 36.0])
    assert (talk.timed, talk.apart) == (1, 0)
    talk.reads.append(40.0)
    add_split(talk, times, now=10.036)
    assert (talk.timed, talk.apart) == (2, 1)


class FakeClient:
    """A server that has kept what was put, and notes what it was asked. `spoil` makes it lie."""

    def __init__(self, spoil: str = "") -> None:
        self.asked: list[str] = []
        self._kept: set[bytes] = set()
        self._spoil = spoil

    def lookup(self, namespace, keys, timeout_s):
        self.asked.append("lookup")
        return _done(prefix=sum(key in self._kept for key in keys) + (self._spoil == "lookup"))

    def get(self, namespace, keys, rows, stall_s, timeout_s, timed):
        self.asked.append("read")
        for row, key in zip(rows, keys, strict=True):
            row[: len(key)] = key[::-1] if self._spoil == "block" else key
        landed = keys[self._spoil == "get" :]
        return _done(landed=landed, outcomes={}, error=None, times=None)

    def put(self, namespace, keys, rows, deferred, timeout_s):
        self.asked.append("write")
        self._kept.update(keys)
        return _done(created=len(keys) - (self._spoil == "put"))


def _done(**fields) -> "Future[SimpleNamespace]":
    future: Future[SimpleNamespace] = Future()
    future.set_result(SimpleNamespace(**fields))
    return future


def test_a_client_pauses_before_each_turn_and_holds_its_conversations_to_the_end():
    client = FakeClient()
    now = iter([0.0, 0.75, 1.25])
    talk = Talker(client, "n", 64, "somebody").talk_for(
        1.0, lambda: client.asked.append("pause"), lambda: next(now)
    )
    assert (talk.conversations, talk.seconds, talk.errors) == (1.5, 1.0, [])  # half of the second
    assert (len(talk.lookups), len(talk.reads), len(talk.writes)) == (14, 12, 6)
    assert client.asked[:5] == ["pause", "lookup", "write", "pause", "lookup"]
    turns = [client.asked[place + 1] for place, what in enumerate(client.asked) if what == "pause"]
    assert turns == ["lookup"] * 14


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("lookup", "1 blocks readable, 0 were written"),
        ("get", "not all blocks came"),
        ("block", "another conversation's block came"),
        ("put", "0 of 1 blocks kept"),
    ],
)
def test_a_wrong_answer_is_an_error_and_no_conversation(spoil: str, said: str):
    talk = Talker(FakeClient(spoil), "n", 64, "somebody").talk_for(0)
    assert talk.conversations == 0
    assert len(talk.errors) == 1 and said in talk.errors[0]


def test_pauses_are_of_their_mean_on_average_and_never_equally_long():
    slept: list[float] = []
    pause = pauses(100, "somebody", slept.append)
    for _ in range(1000):
        pause()
    assert 0.05 <= min(slept) < 0.055 and 0.145 < max(slept) <= 0.15
    assert sum(slept) / len(slept) == pytest.approx(0.1, rel=0.03)


SPLIT = ReadSplit(0.5, 1.5, 2.0, 20.0, 1.0, 25.25, 0.75)


def test_csv_comes_back_as_it_was_and_begins_with_the_sources_columns(tmp_path: Path):
    results = [
        replace(result, write=Percentiles(1.5, 2.5, 3.5, 4.5), errors=2, cpu_percent=55.5,
                server_percent=120.5, split=SPLIT, moved_gb_per_s=0.25, raw_gb_per_s=2.5)
        for result in source.results()
    ]  # fmt: skip
    file = tmp_path / "sweep.csv"
    file.write_text(as_csv([*results, *source.results()]))
    assert read_csv(file) == [*results, *source.results()]
    assert file.read_text().startswith(
        "processes,concurrency_per_process,total_concurrency,tps,tokens_per_sec,"
        "lookup_p50_ms,lookup_p90_ms,lookup_p99_ms,lookup_p100_ms,"
        "read_p50_ms,read_p90_ms,read_p99_ms,read_p100_ms,"
    )
    for wrong in ("a,b\n1,2\n", "processes,concurrency_per_process,tps\n1,1\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="not the CSV of a sweep"):
            read_csv(file)
    file.write_text(as_csv([]))
    with pytest.raises(ConfigError, match="no point of a sweep in it"):
        read_csv(file)


def test_a_record_comes_back_as_it_was(tmp_path: Path):
    results = [
        replace(result, write=Percentiles(1.5, 2.5, 3.5, 4.5), errors=2, cpu_percent=55.5,
                server_percent=120.5, split=SPLIT, moved_gb_per_s=0.25, raw_gb_per_s=2.5)
        for result in source.results()
    ]  # fmt: skip
    record, file = Record.begin("benchmarks.store_sweep", []), tmp_path / "sweep.json"
    record.figures = [as_figure(result) for result in [*results, *source.results()]]
    record.write(file)
    assert read_record(file) == [*results, *source.results()]
    assert "cpu, percent" in as_figure(results[0]).values
    assert "cpu, percent" not in as_figure(source.results()[0]).values
    record.figures = []
    record.write(file)
    with pytest.raises(ConfigError, match="no point of a sweep in it"):
        read_record(file)
    for wrong in ("{}", "no JSON"):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match="not a record of a benchmark"):
            read_record(file)


def test_the_record_of_another_benchmark_is_refused(tmp_path: Path):
    record, file = Record.begin("benchmarks.other", []), tmp_path / "other.json"
    for name in ("a lookup", "1 at once (1x1)"):
        record.figures = [replace(as_figure(source.results()[0]), name=name, values={"keys": 1.0})]
        record.write(file)
        with pytest.raises(ConfigError, match="not the record of a sweep"):
            read_record(file)


# ── conclusions ──────────────────────────────────────────────────────────────────────────────


def test_cores_are_to_spare_when_half_of_them_and_one_whole_are_idle():
    assert spare.cores_to_spare(50.0, cores=2) and not spare.cores_to_spare(50.1, cores=2)
    assert spare.cores_to_spare(50.0, cores=16) and not spare.cores_to_spare(50.1, cores=16)
    assert not spare.cores_to_spare(0.1, cores=1)
    assert spare.cores_to_spare(None, cores=2) is None


def looked_up(concurrency: int, p50: float, cpu: float | None = 10.0, errors: int = 0):
    lookup = Percentiles(p50, None, None, None)
    return replace(
        source.results()[0], point=Point(concurrency, 1), lookup=lookup, cpu_percent=cpu,
        errors=errors,
    )  # fmt: skip


def concluded(*results) -> str:
    return spare.conclusion(spare.verdicts(results, cores=2))


def test_lookups_are_flat_within_25_percent_of_the_point_with_the_fewest_at_once():
    verdicts = spare.verdicts([looked_up(4, 1.26), looked_up(2, 1.25), looked_up(1, 1.0)], cores=2)
    assert [one.result.point.concurrency for one in verdicts] == [1, 2, 4]
    assert [one.times for one in verdicts] == [1.0, 1.25, 1.26]
    assert [one.flat for one in verdicts] == [True, True, False]
    assert [one.words for one in verdicts[1:]] == [("yes", "1.25, flat"), ("yes", "1.26, not flat")]
    broken = spare.verdicts([looked_up(1, 1.0, cpu=99.0), looked_up(2, 1.0, None, 1)], cores=2)
    assert [one.words for one in broken] == [("no", "1.00, flat"), ("-", "-")]
    assert spare.verdicts([], cores=2) == []


def test_the_sources_lookups_are_flat_by_the_rule_and_its_reads_would_not_be():
    assert all(one.flat for one in spare.verdicts(source.results(), source.CORES))
    as_if = [replace(result, lookup=result.read) for result in source.results()]
    flat = [one.result.point.concurrency for one in spare.verdicts(as_if, source.CORES) if one.flat]
    assert flat == [1, 2, 4, 6, 8, 16]


def test_only_points_with_cores_to_spare_count_for_the_conclusion():
    few, some = looked_up(1, 1.0), looked_up(2, 1.2)
    assert concluded(few, some, looked_up(4, 9.0, cpu=99.0)) == (
        "Lookups (p50) are flat within 25 % wherever cores were to spare: 1 and 2 at once."
    )
    assert concluded(few, some, looked_up(4, 2.0), looked_up(6, 3.0)) == (
        "Lookups (p50) are not flat though cores were to spare at 1, 2, 4 and 6: "
        "2.00 times at 4 and 3.00 times at 6 at once."
    )


def test_nothing_is_concluded_without_two_points_to_compare():
    few, busy = looked_up(1, 1.0), looked_up(2, 1.0, cpu=99.0)
    for results in (
        [], [few], [few, busy], [busy, looked_up(4, 1.0), looked_up(8, 1.0)],
        [few, looked_up(2, 1.0, cpu=None)], [few, looked_up(2, 1.0, errors=1)],
        [looked_up(1, 1.0, errors=1), looked_up(2, 1.0), looked_up(4, 1.0)],
    ):  # fmt: skip
        assert "cannot be said" in concluded(*results)


def test_the_rules_choose_from_the_sources_table_what_its_authors_chose():
    chosen = {
        one.profile: one.result.point.concurrency for one in operating_points(source.results())
    }
    assert chosen == {"low latency": 8, "balanced": 32, "high throughput": 64, "maximum": 80}


def test_the_best_configuration_for_each_limit_of_the_source_by_its_own_table():
    found = within_slas(source.results(), slas_for(source.results()))
    assert [(one.limit_ms, one.result and str(one.result.point)) for one in found] == [
        (25, "8x2"), (30, "8x4"), (45, "8x8"), (60, "8x10")
    ]  # fmt: skip
    (none,) = within_slas(source.results(), [5.0])
    assert none.result is None
    assert printed.sla_cells(none)[:2] == ["p50 < 5 ms", "none measured"]
    assert printed.sla_cells(found[0]) == [
        "p50 < 25 ms", "8 processes x 2", "47.6", "54.8", "4.56", "22.29", "27.95", "43.36"
    ]  # fmt: skip


def test_limits_that_do_not_tell_points_apart_are_scaled_to_the_fastest_read():
    fast = [
        replace(one, read=Percentiles(*(p and p / 10 for p in one.read)))
        for one in source.results()
    ]
    limits = slas_for(fast)
    assert limits == [2.5, 3.0, 4.5, 6.0, 25.0]
    assert slas_for([fast[0], source.results()[-1]]) == [25.0, 30.0, 45.0, 60.0], "1x1 and 8x10"
    assert slas_for([fast[0], replace(fast[1], read=Percentiles(99.0, None, None, None))]) == limits
    points = [one.result and str(one.result.point) for one in within_slas(fast, limits)]
    assert points == ["8x2", "8x4", "8x8", "8x10", "8x10"]


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        (0.49, "is not the bottleneck: at most 0.49 GB/s of blocks are moved, at 8x10, 49 % of"),
        (0.5, "is close to being the bottleneck"),
        (0.8, "is the bottleneck: at most"),
    ],
)
def test_the_words_on_the_network_follow_the_share_of_raw_sockets(moved: float, words: str):
    points = [
        replace(source.results()[-1], moved_gb_per_s=part, raw_gb_per_s=1.0)
        for part in (moved, moved / 2)
    ]
    assert words in network.conclusion(points, here=True)
    assert "SKIPPED: the server is on another machine" in network.conclusion(points, here=False)
    failed = [replace(one, errors=1) for one in points]
    assert "cannot be said" in network.conclusion(failed, here=True)


def test_raw_sockets_have_a_speed():
    assert 0 < network.raw_gb_per_s(num_passes=1, row_bytes=4096) < 1000


def test_a_point_with_errors_is_never_recommended():
    results = [replace(result, errors=1) for result in source.results()]
    assert operating_points(results) == []
    with pytest.raises(ConfigError, match="no point reads within"):
        best_within(results, 1000)


def test_a_million_tokens_at_55_000_a_server_are_19_servers(tmp_path, capsys):
    assert servers_for(1_000_000, 55_000) == 19
    assert servers_for(110_000, 55_000) == 2
    csv, json_file = tmp_path / "sweep.csv", tmp_path / "sweep.json"
    csv.write_text(as_csv(source.results()))
    record = Record.begin("benchmarks.store_sweep", [])
    record.figures = [as_figure(result) for result in source.results()]
    record.write(json_file)
    for how in (["--csv", str(csv)], ["--record", str(json_file)], ["--source"]):
        asked = ["plan", "--target-tokens-per-s", "1000000", *how, "--read-p50-ms"]
        assert main([*asked, "25"]) == 0
        assert "19 servers for 1,000,000 tokens/s: each carries 54,800 at 8x2" in (
            capsys.readouterr().out
        )
        assert main([*asked, "10"]) == 2
        assert "no point reads within 10 ms; the fastest measured is 18.81" in (
            capsys.readouterr().err
        )
    assert main(["plan", "--target-tokens-per-s", "1e6", "--per-server-tokens-per-s", "55e3"]) == 0
    assert capsys.readouterr().out.startswith("19 servers for")
    assert main(["plan", "--target-tokens-per-s", "5e4", "--per-server-tokens-per-s", "55e3"]) == 0
    assert capsys.readouterr().out.startswith("1 server for")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("plan --target-tokens-per-s 1e6", "one of the arguments --record --csv"),
        ("plan --source", "--target-tokens-per-s"),
        ("plan --source --target-tokens-per-s 0", "0 is not a number above 0"),
        ("plan --source --target-tokens-per-s nan", "nan is not a number above 0"),
        ("plan --source --target-tokens-per-s many", "many is not a number above 0"),
        ("plan --source --csv x --target-tokens-per-s 1", "not allowed with"),
        ("plan --per-server-tokens-per-s 9 --read-p50-ms 9 --target-tokens-per-s 9", "read_p50_ms"),
        ("plan --csv /nowhere --target-tokens-per-s 1", "/nowhere: not the CSV of a sweep"),
        ("plan --record /nowhere --target-tokens-per-s 1", "/nowhere: not a record of a benchmark"),
        ("--concurrency 1,many", "'many' is neither a number nor like 8x2"),
        ("--seconds 0", "0 is not a number above 0"),
        ("--rounds 0", "0 is less than 1"),
        ("--storage-latency-ms -20", "-20 is not a number above 0"),
        ("--storage-channels 4", "no storage is emulated without --storage-latency-ms"),
        ("--storage-spread-percent 4", "no storage is emulated without --storage-latency-ms"),
        ("--storage-latency-ms 9 --storage-spread-percent 101", "101 is not from 0 to 100"),
        ("--block-bytes 0", "block_bytes: a block has at least one byte"),
        ("--json /nowhere/there.json", "there is no folder /nowhere"),
        ("--servers 0", "0 is less than 1"),
        ("--server 127.0.0.1:5757", "tcp:// in front is missing"),
        ("--server tcp://a:1 --server tcp://a:1", "the same address is given twice"),
        ("--server tcp://a:1 --servers 2", "servers: are started here; with --server none is"),
        ("--server tcp://a:1 --storage-latency-ms 20", "the delay is emulated in a server that"),
        ("--sla-ms 25,0", "0 is not a number above 0"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_measured(asked, said, capsys):
    try:
        status = main(asked.split())
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert said in capsys.readouterr().err


# ── the emulated storage ─────────────────────────────────────────────────────────────────────


def test_a_storage_serves_as_many_blocks_at_once_as_it_has_channels():
    channels = Channels(latency_s=1.0, num_channels=2, spread=0.0)
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(1, now=10.0) == 11.0
    assert channels.done_at(3, now=10.5) == 13.0  # two behind the first two, one behind those
    assert channels.done_at(2, now=20.0) == 21.0


def test_a_storage_takes_its_latency_on_average_and_spreads_evenly_around_it():
    channels = Channels(latency_s=1.0, num_channels=1, spread=0.2)
    taken = [channels.done_at(1, now=10.0 * number) - 10.0 * number for number in range(2000)]
    assert 0.8 <= min(taken) < 0.81 and 1.19 < max(taken) <= 1.2
    assert sum(taken) / len(taken) == pytest.approx(1.0, rel=0.01)
    assert sum(one < 0.9 for one in taken) == pytest.approx(500, rel=0.15)


def test_gets_wait_for_the_storage_and_everything_else_overtakes_them():
    now, handled = [0.0], []
    gets = SlowGets(
        lambda client, frames, arrived: handled.append(frames), Channels(0.25, 4, 0.0),
        lambda: now[0],
    )  # fmt: skip

    def message(request: protocol.Request) -> list[memoryview]:
        return [memoryview(frame) for frame in protocol.encode(request)]

    read = message(protocol.Get(request_id=1, namespace="n", keys=[b"k"]))
    lookup = message(protocol.Lookup(request_id=2, namespace="n", keys=[b"k"]))
    nothing = message(protocol.Get(request_id=3, namespace="n", keys=[]))
    garbage = [memoryview(b"KVF1"), memoryview(b"\xff")]
    for frames in (read, lookup, nothing, garbage):
        gets.handle(b"client", frames)
    assert handled == [lookup, nothing, garbage]
    assert gets.go_on() == 250
    now[0] = 0.125
    assert gets.go_on() == 125
    assert read not in handled
    now[0] = 0.25
    assert gets.go_on() == 0, "the answer has to be sent"
    assert handled[-1] == read
    assert gets.go_on() is None
    times = gets.timing(lambda request: RequestTimes(0.0, lambda: now[0]))(None)
    assert times.now() == (250_000, 250_000), "the emulated time is the storage's"


# ── for real ─────────────────────────────────────────────────────────────────────────────────


def test_a_sweep_over_two_running_servers_is_without_errors_and_its_page_needs_nothing_else(
    tmp_path: Path,
):
    files = {name: tmp_path / f"sweep.{name}" for name in ("csv", "json", "html")}
    outputs = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    small = ["--concurrency", "1,1x2", "--rounds", "1", "--seconds", "0.2", "--block-bytes", "4099"]
    config = ServerConfig(bind="tcp://127.0.0.1:*", memory=16 * MiB, populate=False)
    with Server(config) as one, Server(config) as other:
        small += ["--server", one.endpoint, "--server", other.endpoint]
        assert main([*small, *outputs]) == 0
        for server in (one, other):
            assert server.store.counters["put_created"] > 0, "both carry a part of the load"
            assert not server.store.namespaces, "nothing of it is kept"
    results = read_csv(files["csv"])
    assert [str(result.point) for result in results] == ["1x1", "1x2"]
    for result in results:
        assert result.errors == 0
        assert result.tokens_per_s == pytest.approx(result.tps * 1152, rel=1e-3)
        assert result.lookup.p50 and result.read.p50 and result.write.p50
        assert result.split is not None
        assert sum(result.split.parts.values()) == pytest.approx(result.split.read, rel=0.05)
        assert result.raw_gb_per_s and result.server_percent is None
    record = json.loads(files["json"].read_text())
    assert record["command"] == " ".join(["python -m benchmarks.store_sweep run", *small])
    assert record["parameters"]["servers"] == "2 servers on this machine, running already"
    assert "of the" in record["parameters"]["network"]
    assert [figure["name"] for figure in record["figures"]] == [
        "1 at once (1x1)",
        "2 at once (1x2)",
    ]
    _check_page(files["html"].read_text(), num_points=2, with_split=True)


def test_with_20_ms_of_storage_a_read_takes_them_and_a_lookup_does_not(tmp_path: Path, capsys):
    csv = tmp_path / "sweep.csv"
    arguments = [
        "--concurrency", "1x2", "--seconds", "0.3", "--rounds", "1", "--block-bytes", "4KiB",
        "--servers", "2", "--storage-latency-ms", "20", "--storage-spread-percent", "0",
    ]  # fmt: skip
    assert main([*arguments, "--csv", str(csv)]) == 0
    (result,) = read_csv(csv)
    assert result.errors == 0
    assert result.read.p50 >= 20
    assert result.lookup.p50 < result.read.p50 - 15, "the machine may be busy, the storage is not"
    assert result.split is not None and result.split.storage >= 19.9, (
        "not the server's, nor the wire"
    )
    printed_text = capsys.readouterr().out
    assert "EMULATED" in printed_text and "2 servers on this machine" in printed_text


def test_a_server_that_is_not_there_is_named_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.remote_kv_cache.baseline.ferry_client._READY_S", 0.05)
    assert main(["--server", "tcp://127.0.0.1:9", "--concurrency", "1"]) == 2
    assert "tcp://127.0.0.1:9: no connection over tcp" in capsys.readouterr().err


class _Page(HTMLParser):
    """Counts what a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]


def _check_page(text: str, num_points: int, *, with_split: bool = False) -> None:
    parsed = _Page(text)
    assert not re.findall(r"https?://|//[a-z]|@import|src=", text), "an address outside"
    assert parsed.tags.count("svg") == 3 + with_split
    assert parsed.tags.count("table") == 5 + with_split
    assert parsed.tags.count("script") == 1
    assert len(parsed.ids) == len(set(parsed.ids)), "two charts share a name"
    tables = 3 if with_split else 2
    assert len(re.findall(r"<tr><td>", text)) == tables * num_points + len(source.results())
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text and "#010203" not in text
    assert not re.findall(r"fill: ?#000000|stroke: ?#000000", text), "black letters in the dark"


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sweep") / "page.html"
    record = Record.begin("benchmarks.store_sweep", ["--concurrency", "<&>"])
    record.parameters["emulated storage"] = "20 ms <b>"
    file.write_text(rendered(record, source.results()))
    return file


def rendered(record: Record, results: list[Result], cores: int = 80) -> str:
    slas = within_slas(results, slas_for(results))
    return page.render(record, spare.verdicts(results, cores), slas, 4096)


def test_what_is_emulated_is_said_and_escaped(sample_page: Path):
    text = sample_page.read_text()
    assert "The storage is emulated:</strong> 20 ms &lt;b&gt;" in text
    assert "&lt;&amp;&gt;" in text
    _check_page(text, num_points=len(source.results()))


def test_every_point_has_its_exact_values_as_a_title_without_any_script(sample_page: Path):
    text = sample_page.read_text()
    tip = "read p99: 166.90 ms at 80 at once (8x10), 93.9 K tokens/s"
    assert f'aria-label="{tip}"><title>{tip}</title>' in text
    assert "93.9 thousands of tokens a second at 80 at once (8x10)" in text
    assert text.count('class="point"') == 2 * 3 * 9 + 2 * 9
    assert text.count('<div class="keys" role="group" aria-label="series" hidden>') == 3


def test_the_script_shows_values_moves_by_arrows_and_switches_series(sample_page: Path):
    """In node, with as much of a browser's document as the script touches."""
    if (node := shutil.which("node")) is None:
        pytest.skip("no node on the PATH")
    done = subprocess.run(
        [node, str(Path(__file__).parent / "chart_script.mjs")], input=interactive.SCRIPT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_points_that_nearly_coincide_share_a_name_above_the_chart(sample_page: Path):
    above = re.findall(r">([\d, ]+)</text>", sample_page.read_text())
    assert above.count("64, 80") == 2 and above.count("32") >= 2


def test_the_page_says_of_each_point_whether_cores_were_to_spare_and_lookups_flat(tmp_path: Path):
    results = [looked_up(1, 1.0), looked_up(2, 1.3), looked_up(4, 1.2, 99.0)]
    verdicts = spare.verdicts(results, 2)
    text = rendered(Record.begin("b", []), results, cores=2)
    for words in (("yes", "1.00, flat"), ("yes", "1.30, not flat"), ("no", "1.20, flat")):
        assert "".join(f"<td>{word}</td>" for word in words) in text
    assert spare.conclusion(verdicts) in text


async def test_a_browser_shows_the_page_by_day_and_by_night(sample_page: Path):
    """Letters and ground swap; no request leaves the page; nothing is wider than a phone."""
    driver = Path(__file__).parent.parent / "remote_server" / "browser.py"
    if not driver.exists():
        pytest.skip("no driver of a browser here")
    spec = importlib.util.spec_from_file_location("browser", driver)
    assert spec is not None and spec.loader is not None
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    if (chromium := browser.find_chromium()) is None:
        pytest.skip("no Chromium on the PATH, and KVFERRY_CHROMIUM names none")
    colours = """[getComputedStyle(document.body).backgroundColor,
                  getComputedStyle(document.querySelector('svg text')).fill]"""
    async with browser.Browser(chromium) as opened:
        await opened.open(sample_page.as_uri())
        await opened.show(1000, 900)
        by_day = await opened.value(colours)
        await opened.show(390, 800, dark=True)
        by_night = await opened.value(colours)
        assert by_day[0] == "rgb(255, 255, 255)" and by_night[0] == "rgb(22, 24, 28)"
        assert by_day[1] == "rgb(26, 26, 26)" and by_night[1] == "rgb(232, 232, 232)"
        assert await opened.value("performance.getEntriesByType('resource').length") == 0
        assert await opened.value("document.documentElement.scrollWidth <= 390")
        await opened.value("document.querySelector('.keys button').click()")
        off = "document.querySelectorAll('.point.off').length"
        assert await opened.value(off) == len(source.results())
        await opened.value("document.querySelector('.point[tabindex=\"0\"]').focus()")
        assert "ms at 1 at once" in await opened.value("document.querySelector('.tip').textContent")
        assert await opened.value(
            "document.querySelector('.tip').getBoundingClientRect().right <= innerWidth"
        )
        assert not opened.problems
