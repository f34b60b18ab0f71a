"""The rules of the sweep: conversations, pooled points, records and conclusions."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.harness.record import Record
from benchmarks.store_sweep import source, spare
from benchmarks.store_sweep.figures import as_figure, read_record
from benchmarks.store_sweep.load import conversation, network, sweep
from benchmarks.store_sweep.load.talkers import Talk, Talker, add_split
from benchmarks.store_sweep.operating import best_within, operating_points, slas_for, within_slas
from benchmarks.store_sweep.points import Percentiles, Point, ReadSplit, Result, as_csv, read_csv
from remote_server.client import GetTimes
from remote_server.errors import ConfigError


def test_a_key_depends_on_all_that_came_before_it():
    keys = [
        key
        for speaker, number in ((b"a", 0), (b"a", 1), (b"b", 0))
        for key in conversation.keys_of(speaker, number)
    ]
    assert len(set(keys)) == len(keys) == 3 * conversation.BLOCKS
    assert {len(key) for key in keys} == {36}
    assert keys[:3] == conversation.keys_of(b"a", 0)


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

    def lookup(self, namespace, keys, timeout_s, chain, anchors):
        assert anchors == keys[:1] * len(keys)
        self.asked.append("lookup")
        return _done(prefix=sum(key in self._kept for key in keys) + (self._spoil == "lookup"))

    def get(self, namespace, keys, rows, stall_s, timeout_s, timed, anchors):
        self.asked.append("read")
        for row, key in zip(rows, keys, strict=True):
            row[: len(key)] = key[::-1] if self._spoil == "block" else key
        landed = keys[self._spoil == "get" :]
        return _done(landed=landed, outcomes={}, error=None, times=None)

    def put(self, namespace, keys, rows, deferred, timeout_s, chain, anchors):
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


SPLIT = ReadSplit(0.5, 1.5, 2.0, 20.0, 1.0, 25.25, 0.75)


MEASURED = [
    replace(result, write=Percentiles(1.5, 2.5, 3.5, 4.5), errors=2, cpu_percent=55.5,
            server_percent=120.5, split=SPLIT, moved_gb_per_s=0.25, raw_gb_per_s=2.5)
    for result in source.results()
]  # fmt: skip


def test_csv_comes_back_as_it_was_and_begins_with_the_sources_columns(tmp_path: Path):
    file = tmp_path / "sweep.csv"
    file.write_text(as_csv([*MEASURED, *source.results()]))
    assert read_csv(file) == [*MEASURED, *source.results()]
    assert file.read_text().startswith(
        "processes,concurrency_per_process,total_concurrency,tps,tokens_per_sec,"
        "lookup_p50_ms,lookup_p90_ms,lookup_p99_ms,lookup_p100_ms,"
        "read_p50_ms,read_p90_ms,read_p99_ms,read_p100_ms,"
    )
    for wrong, why in (
        ("a,b\n1,2\n", "not the CSV of a sweep"),
        ("processes,concurrency_per_process,tps\n1,1\n", "not the CSV of a sweep"),
        (as_csv([]), "no point of a sweep in it"),
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=why):
            read_csv(file)


def test_a_record_comes_back_as_it_was_and_another_one_is_refused(tmp_path: Path):
    record, file = Record.begin("benchmarks.store_sweep", []), tmp_path / "sweep.json"
    record.figures = [as_figure(result) for result in [*MEASURED, *source.results()]]
    record.write(file)
    assert read_record(file) == [*MEASURED, *source.results()]
    record.figures = []
    record.write(file)
    with pytest.raises(ConfigError, match="no point of a sweep in it"):
        read_record(file)
    record.benchmark = "benchmarks.other"
    record.figures = [replace(as_figure(source.results()[0]), name="a", values={"keys": 1.0})]
    record.write(file)
    with pytest.raises(ConfigError, match="not the record of a sweep"):
        read_record(file)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not a record of a benchmark"):
        read_record(file)


def looked_up(concurrency: int, p50: float, cpu: float | None = 10.0, errors: int = 0) -> Result:
    lookup, point = Percentiles(p50, None, None, None), Point(concurrency, 1)
    return replace(source.results()[0], point=point, lookup=lookup, cpu_percent=cpu, errors=errors)


def test_cores_are_to_spare_when_half_of_them_and_one_whole_are_idle():
    assert spare.cores_to_spare(50.0, cores=2) and not spare.cores_to_spare(50.1, cores=2)
    assert spare.cores_to_spare(50.0, cores=16) and not spare.cores_to_spare(50.1, cores=16)
    assert not spare.cores_to_spare(0.1, cores=1)
    assert spare.cores_to_spare(None, cores=2) is None


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


def test_only_points_with_cores_to_spare_count_for_the_conclusion():
    few, some = looked_up(1, 1.0), looked_up(2, 1.2)
    assert concluded(few, some, looked_up(4, 9.0, cpu=99.0)) == (
        "Lookups (p50) are flat within 25 % wherever cores were to spare: 1 and 2 at once."
    )
    assert "is unknown" in concluded(few, looked_up(2, 1.0, cpu=99.0)), "nothing to compare"
    assert concluded(few, some, looked_up(4, 2.0), looked_up(6, 3.0)) == (
        "Lookups (p50) are not flat though cores were to spare at 1, 2, 4 and 6: "
        "2.00 times at 4 and 3.00 times at 6 at once."
    )


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
    assert "is unknown" in network.conclusion(failed, here=True)


def test_a_point_with_errors_is_never_recommended():
    results = [replace(result, errors=1) for result in source.results()]
    assert operating_points(results) == []
    with pytest.raises(ConfigError, match="no point reads within"):
        best_within(results, 1000)
