"""What the engine benchmarks make of their batches. No engine is started here."""

import csv
import io

import pytest

from benchmarks.engine.driver import Answer, Batch, Counters, Span
from benchmarks.engine.profile import merge, profile, within
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache import test_swap as swap
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from benchmarks.remote_kv_cache.transfer import in_results as into
from benchmarks.remote_kv_cache.transfer import out_results as out
from benchmarks.remote_kv_cache.transfer.in_results import COLD, FIRST, SECOND
from benchmarks.remote_kv_cache.transfer.out_results import CONTROL, NONE, POOL, SERVER


def batch(seconds: float, count: int = 4, cached: dict[str, int] | None = None) -> Batch:
    levels = {"engine": 0, "pool": 0, "server": 0, **(cached or {})}
    answers = [Answer(961, levels, seconds / 2, seconds, [1, 2]) for _ in range(count)]
    return Batch(answers, seconds, 10, {"ours": 0.001, "vLLM's": 0.002, "waiting": 0.0})


def ticks(seconds: float, count: int) -> list[float]:
    """Values a little apart, so that no two are equal."""
    return [seconds * (1 + tick / 1000) for tick in range(count)]


def test_time_that_several_spans_cover_counts_once():
    assert merge([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]
    assert within(0.5, 3.5, [(0.0, 1.0), (3.0, 4.0)]) == 1.0
    assert within(5.0, 6.0, [(0.0, 1.0)]) == 0.0


def test_a_profile_says_what_was_beside_the_steps_of_the_model_and_what_was_not():
    spans = [
        Span("compute", 0.0, 0.4), Span("compute", 0.5, 0.9),
        Span("store", 0.3, 0.5, 100), Span("load", 0.9, 1.0, 50),
    ]  # fmt: skip
    made = profile(batch(1.0), spans)
    assert made.compute == pytest.approx(0.8)
    assert made.between == pytest.approx(0.2)
    assert made.copying == pytest.approx(0.3)
    assert made.overlap == pytest.approx(1 / 3)
    assert "200.0 between steps, of which 1.0 in our hooks and 2.0 in vLLM's" in made.describe()
    assert "33% of it beside computing" in made.describe()


def transfer_out_record(with_server_s: float) -> tuple[Record, transfer_out.TransferOutBench]:
    arguments = transfer_out.presets.parser("m", "q", transfer_out.PRESETS).parse_args([])  # type: ignore[attr-defined]
    bench = transfer_out.TransferOutBench(transfer_out.PRESETS["laptop"], arguments)
    record = Record("b", "c")
    for variant, seconds in (
        (NONE, 1.0), (CONTROL, 1.03), (POOL, 1.01), (SERVER, with_server_s),
    ):  # fmt: skip
        key = out.Key("on", 512, variant)
        trials = []
        for value in [9.0, *ticks(seconds, 6)]:
            made = batch(value)
            trials.append(out.Trial(made, profile(made, [Span("compute", 0.0, 0.5)])))
        bench.trials[key] = trials
        record.rows.append(out.row_of("small", key, Sample([0.0] * 6, [0.0]), trials))
    record.figures += out.figures_of(record, bench.trials)
    return record, bench


def test_the_ratio_is_of_rounds_and_warm_ups_are_left_out():
    record, bench = transfer_out_record(1.02)
    figures = {figure.name: figure.values for figure in record.figures}
    values = figures["engine cache on, 512 tokens a step, CPU pool + server"]
    assert values["ratio"] == pytest.approx(1 / 1.02)
    assert values["requests a second"] == pytest.approx(4 / 1.02, rel=0.01)
    assert values["delta ratio"] == pytest.approx(1.01 / 1.02)
    control = figures["engine cache on, 512 tokens a step, no connector, again"]
    assert control["ratio"] == pytest.approx(1 / 1.03)
    text = out.describe(record, bench.trials)
    assert "0.980 (0.980 to 0.980)" in text and "NOT met" not in text
    line = text.splitlines()[3]
    assert "0.990 (0.990 to 0.990)" in line, "of pool and server, to the pool"
    assert line.endswith("0.97"), "the source's own delta stands beside it"
    assert "between steps" not in text, "a row that is met needs no profile"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((0.97, 0.96, 0.98, 6), "met"),
        ((0.97, 0.94, 0.98, 6), "not certain: use more --trials"),
        ((0.94, 0.90, 0.96, 6), "not certain: use more --trials"),
        ((0.90, 0.88, 0.94, 6), "NOT met"),
        ((0.97, 0.96, 0.98, 5), "not judged: 5 rounds, and a verdict takes 6"),
    ],
)
def test_the_goal_is_met_or_missed_only_when_all_of_the_interval_of_enough_rounds_is(values, said):
    named = dict(zip(("ratio", "low", "high", "rounds"), values, strict=True))
    assert out.verdict(named) == said


def transfer_in_record() -> Record:
    record = Record("b", "c")
    sample = Sample([0.0] * 5, [0.0])
    seconds = {FIRST: (1.0, 0.6, 0.2), SECOND: (0.3, 0.25, 0.2)}
    points = [
        (into.Key("off", which, rate), seconds[which][place])
        for which in (FIRST, SECOND)
        for place, rate in enumerate((0.0, 0.5, 1.0))
    ]
    for key, each in [*points, (into.Key("off", SECOND, None), 1.0)]:
        near = round((key.rate or 0.0) * 961) // 32 * 32
        cached = {"pool": near, "server": 960 - near if key.which == SECOND else 0}
        if key.rate is None:
            cached = {}
        made = [batch(value, cached=cached) for value in [7.0, *ticks(each, 5)]]
        record.rows.append(transfer_in_row(key, sample, made))
        record.figures += into.figures_of(key, sample, made, 32 * 3072, 32)
    return record


def transfer_in_row(key: into.Key, sample: Sample, made: list[Batch]):
    from benchmarks.remote_kv_cache.test_transfer_in import row_of

    return row_of("small", key, sample, made)


def test_each_claim_has_its_verdict_and_the_control_tells_of_drift():
    text = into.describe(transfer_in_record())
    assert "second pass against the first: 3.3x" in text and "3.33x faster" in text
    assert "what is computed, after the restart against before: not significant" in text
    assert "first pass: 100 % against 0 %: 5.0x, 5.00x faster; 2 of 2 steps rise" in text
    assert COLD in text


def test_the_csv_has_every_point_with_what_was_reached_and_loaded():
    text = into.csv(transfer_in_record(), "simulated:12")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert {row["measured on"] for row in rows} == {"simulated:12"}
    assert [(row["pass"], row["hit rate"]) for row in rows] == [
        *((which, rate) for which in (FIRST, SECOND) for rate in ("0", "0.5", "1")), (SECOND, ""),
    ]  # fmt: skip
    half = rows[4]
    assert float(half["pool"]) == pytest.approx(480 / 961, abs=1e-5)
    assert float(half["server"]) == pytest.approx(480 / 961, abs=1e-5)
    assert float(half["loaded bytes"]) == 4 * 15 * 32 * 3072
    assert float(half["latency p99"]) == pytest.approx(0.25, rel=0.01)


def test_a_point_that_failed_has_no_figures_and_its_reason_is_shown():
    record = transfer_in_record()
    failed = Sample(failed="AssertionError: 1 of 2 bytes went server to pool")
    key = into.Key("on", FIRST, 0.0)
    assert into.figures_of(key, failed, [], 1, 32) == []
    record.rows.append(transfer_in_row(key, failed, []))
    assert "FAILED: AssertionError: 1 of 2 bytes went server to pool" in into.describe(record)


def test_a_copy_beside_a_step_is_told_from_one_that_the_model_waited_for():
    spans = [
        Span("compute", 0.0, 1.0), Span("store", 0.2, 0.4, 100), Span("load", 1.0, 1.1, 100),
        Span("load", 0.9, 1.0, 100),
    ]  # fmt: skip
    trial = swap.Trial(batch(1.2), Counters(), spans)
    assert trial.overlap("store") == pytest.approx(1.0)
    assert trial.overlap("load") == pytest.approx(0.5)
    assert swap.Trial(batch(1.2), Counters()).overlap("load") is None, "a GPU's copies are not seen"
