"""What the benchmark of a busy engine makes of its answers and counters. No engine is started."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.compare import compare_records
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache import busy_plan, test_busy
from benchmarks.remote_kv_cache import busy_results as results
from benchmarks.remote_kv_cache.busy_plan import BLOCK_TOKENS, Plan
from benchmarks.remote_kv_cache.busy_results import NONE, OFF, ON, Answers, Counted, Key, Trial
from examples.engine import Completion
from remote_server.errors import ConfigError

PROMPT = 24 * BLOCK_TOKENS + 1
TOKENS = [7, 8, 9]
NOTHING = Counted({"engine": 0, "pool": 0, "server": 0}, 0, {})


def answer(tokens: list[int] | None = None, first_s: float = 0.1, second: int = 5) -> Completion:
    """`second` is a candidate as good as each token: nearly."""
    tokens = TOKENS if tokens is None else tokens
    logprobs = [{f"token_id:{each}": -1.0, f"token_id:{second}": -1.09} for each in tokens]
    return Completion("", tokens, logprobs, PROMPT, 0, first_s, 1.0, {})


def trial(*held: Completion, seconds: float = 1.0, counted: Counted = NOTHING) -> Trial:
    return Trial(held, [], seconds, counted)


def from_server(tokens: int, **not_used: int) -> Counted:
    reasons = {name.replace("_", ": ", 1): number for name, number in not_used.items()}
    levels = {"engine": 0, "pool": 0, "server": tokens}
    return Counted(levels, tokens // BLOCK_TOKENS, reasons)


def record_of(**engines: list[Trial]) -> Record:
    """Of one cell on each engine, with one warm-up."""
    record = Record("b", "c")
    names = {"none": NONE, "off": OFF, "on": ON}
    for short, trials in engines.items():
        key = Key(50.0, 2, names[short])
        sample = results.row_values(Sample([0.0] * (len(trials) - 1), [0.0]), trials)
        sample = results.judged(sample, trials, engines["none"])
        record.rows.append(Row("small", str(key), 0, sample))
        record.figures += results.figures_of(key, sample, trials, engines["none"], BLOCK_TOKENS)
    return record


# ── counting ─────────────────────────────────────────────────────────────────────────────────


def test_the_share_is_of_complete_rows_and_of_timed_rounds_only():
    half = from_server(24 * BLOCK_TOKENS)
    record = record_of(
        none=[trial(answer(), answer())] * 2,
        off=[trial(answer(), answer()), trial(answer(), answer(), counted=half)],
    )
    values = results.cells(record)[Key(50.0, 2, OFF)]
    assert values["from the server"] == pytest.approx(50.0), "24 of 48 rows, not of 50 and a bit"
    assert results.cells(record)[Key(50.0, 2, NONE)]["from the server"] == 0


def test_prompts_that_nobody_holds_count_for_the_rate_and_not_for_the_share_or_the_first_token():
    whole = from_server(24 * BLOCK_TOKENS)
    mixed = Trial([answer(first_s=0.25)], [answer(first_s=9.0)] * 3, 2.0, whole)
    (figure,) = results.figures_of(Key(0.0, 1, ON), Sample([2.0]), [mixed], [], BLOCK_TOKENS)
    assert figure.values["from the server"] == pytest.approx(100.0)
    assert figure.values["prompts a second"] == pytest.approx(2.0)
    assert figure.values["output tokens a second"] == pytest.approx(6.0)
    assert figure.values["first token max"] == 0.25


def test_what_was_not_used_is_counted_by_reason_between_two_looks_at_the_page():
    def page(server: int, landed: int, late: int, spent: int, in_use: int) -> dict[str, float]:
        cached = "vllm:prompt_tokens_cached_by_source_total"
        return {
            f'{cached}{{engine="0",source="external_unspecified"}}': server,
            f'{cached}{{engine="0",source="host"}}': 32,
            'kvferry_loaded_blocks_total{engine="0",outcome="hit"}': landed,
            'kvferry_loaded_blocks_total{engine="0",outcome="late"}': late,
            'kvferry_missed_blocks_total{engine="0",reason="budget_spent"}': spent,
            'kvferry_missed_blocks_total{engine="0",reason="absent"}': 5,
            'kvferry_declined_blocks_total{engine="0",reason="pinned"}': in_use,
            "kvferry_wait_seconds_count": 3,
        }

    counted = Counted.between(page(0, 10, 0, 1, 0), page(640, 30, 4, 3, 2))
    assert counted.hit_tokens == 640
    assert counted.loaded_blocks == 20
    assert counted.not_used == {"load: late": 4, "missed: budget_spent": 2, "declined: pinned": 2}


def test_a_metric_that_first_appears_in_a_cell_counts_from_nothing():
    counted = Counted.between({}, {'kvferry_missed_blocks_total{reason="lookup_late"}': 3.0})
    assert counted.not_used == {"missed: lookup_late": 3}
    assert Counted.between({}, {"kvferry_hook_errors_total": 1.0}).hook_errors == 1


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (from_server(640), ""),
        (Counted({"engine": 0, "pool": 640, "server": 0}, 20, {}), ""),
        (Counted({"engine": 0, "pool": 640, "server": 0}, 19, {}), "19 blocks loaded: some were"),
        (Counted({"engine": 32, "pool": 0, "server": 0}, 1, {}), "32 tokens were in the engine's"),
        (Counted({"engine": 0, "pool": 0, "server": 0}, 0, {}, 2), "2 exceptions in hooks"),
    ],
)
def test_tokens_that_were_on_the_engine_before_make_the_cell_invalid(counted: Counted, said: str):
    problem = counted.problem(BLOCK_TOKENS)
    assert said in problem and bool(problem) == bool(said)


# ── answers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mine", "verdict"),
    [
        ([7, 8, 9], "equal"),
        ([7, 8, 5], "tied"),
        ([7, 5, 100], "tied"),  # what follows another token is another text
        ([7, 8, 100], "wrong"),
        ([100, 8, 9], "wrong"),
    ],
)
def test_a_differing_token_is_wrong_unless_the_reference_held_it_for_as_good(mine, verdict):
    assert answer(mine).compared_with(answer()) == verdict


def test_a_candidate_that_is_clearly_worse_is_wrong():
    reference = Completion("", [7], [{"token_id:7": -1.0, "token_id:5": -1.2}], 33, 0, 0.1, 1.0, {})
    assert answer([5]).compared_with(reference) == "wrong"


def test_one_wrong_answer_makes_the_cell_failed_and_gives_it_no_figures():
    record = record_of(
        none=[trial(answer(), answer())] * 2,
        off=[trial(answer(), answer()), trial(answer(), answer([7, 8, 100]))],
        on=[trial(answer(), answer()), trial(answer(), answer([7, 8, 5]))],
    )
    reasons = {row.operation: row.reason for row in record.rows}
    failed = "FAILED: 1 of 4 answers differ from those without a connector"
    assert [*reasons.values()] == ["", failed, ""]
    assert set(results.cells(record)) == {Key(50.0, 2, NONE), Key(50.0, 2, ON)}
    text = results.describe(record)
    assert f"steps of 50 ms, 2 prompts, break-even off: {failed}" in text
    assert "3 equal, 1 tied" in text


def test_a_cell_that_failed_for_another_reason_keeps_it():
    sample = Sample([], failed="AssertionError: 2 exceptions in hooks")
    assert results.judged(sample, [trial(answer([1, 2, 3]))], [trial(answer())]) is sample


def test_rounds_that_only_one_of_two_engines_has_are_not_compared():
    mine, bare = [trial(answer())] * 3, [trial(answer())]
    assert results.compared(mine, bare) == Answers(equal=1)
    (figure,) = results.figures_of(Key(0.0, 1, ON), Sample([1.0] * 3), mine, [], BLOCK_TOKENS)
    record = Record("b", "c", figures=[figure])
    assert "not compared" in results.describe(record)


# ── table, plot, compare ─────────────────────────────────────────────────────────────────────


def cells_of(seconds: float, spent: int) -> Record:
    counted = from_server(12 * BLOCK_TOKENS, missed_budget_spent=spent)
    return record_of(
        none=[trial(answer(), answer(), seconds=2.0)] * 2,
        off=[trial(answer(), answer(), seconds=seconds, counted=counted)] * 2,
    )


def test_a_line_has_the_share_the_rate_beside_no_connector_and_the_reasons():
    lines = results.describe(cells_of(1.0, spent=2)).splitlines()
    assert lines[2].split()[:6] == ["of", "50", "ms", "2", "no", "connector"]
    assert "25.0" in lines[3] and "2.00" in lines[3], "half the time is twice the rate"
    assert lines[3].endswith("missed: budget_spent 2")


def test_two_runs_are_compared_cell_by_cell(tmp_path: Path):
    first, second = cells_of(2.0, spent=4), cells_of(1.0, spent=1)
    for name, record in (("a", first), ("b", second)):
        record.write(tmp_path / name)
    text = compare_records(Record.read(tmp_path / "a"), Record.read(tmp_path / "b")).text
    (line,) = [each for each in text.splitlines() if "missed: budget_spent" in each]
    assert line.split()[-4:] == ["4.00", "1.00", "-75.0", "%"]


def test_the_plot_has_a_line_for_each_connector_and_none_for_the_engine_without():
    svg = results.chart(cells_of(1.0, spent=0)).svg()
    assert "steps of 50 ms, break-even off" in svg and NONE not in svg


@pytest.mark.parametrize("key", [Key(0.0, 32, NONE), Key(50.0, 4, ON), Key(0.5, 1, OFF)])
def test_a_cell_is_found_again_by_its_name(key: Key):
    assert Key.read(str(key)) == key


# ── options and prompts ──────────────────────────────────────────────────────────────────────


def plan(*argv: str) -> Plan:
    return Plan.of(busy_plan.parser("m").parse_args(argv))


def test_all_engines_are_asked_the_same_queue_and_none_twice():
    made = plan("--depths", "2,3", "--step-ms", "0,50", "--trials", "2", "--new-between", "1")
    keys = [key for step_ms in made.step_ms for key in made.keys(step_ms)]
    assert len(keys) == 2 * 2 * 3
    queues = {
        (key.step_ms, key.depth, turn): made.held(key, turn) for key in keys for turn in (0, 1)
    }
    for key in keys:
        assert made.held(key, 1) == queues[key.step_ms, key.depth, 1]
    new = [request for key in keys for turn in (0, 1) for request in made.new(key, turn)]
    asked = [
        *made.all_held(),
        *new,
        *made.fillers(),
        *(r for e in made.engines for r in made.warm(e)),
    ]
    assert len(new) == 2 * 2 * 5 * 3
    assert len({tuple(request.prompt) for request in asked}) == len(asked)


def test_new_prompts_stand_behind_those_that_the_server_holds():
    made = plan("--depths", "2", "--new-between", "2", "--step-ms", "0")
    key = made.keys(0.0)[0]
    held, new = made.held(key, 0), made.new(key, 0)
    assert test_busy.in_between(held, new) == [held[0], *new[:2], held[1], *new[2:]]
    assert test_busy.in_between(held, []) == held


def test_the_pool_and_the_engines_cache_are_smaller_than_what_pushes_the_prompts_out():
    made = plan()
    filled = len(made.fillers()) * made.blocks * made.row_bytes
    assert filled > made.cpu_pool > made.kv_cache


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--input-len", "768"], "--input-len 768: a multiple of the 32 tokens"),
        (["--input-len", "31"], "--input-len 31: no complete block"),
        (["--depths", "40"], "--cpu-pool has 1,706 rows, and the deepest queue has 1,920"),
        (["--depths", "32", "--new-between", "2"], "the deepest queue has 2,304"),
        (["--kv-cache", "1MiB"], "--kv-cache has 10 blocks, and 4 requests at a time need 100"),
        (["--depths", "0"], "0 is less than 1"),
        (["--depths", "4,4"], "4,4 has a value twice"),
        (["--step-ms", "0,-5"], "-5 is not a number above 0"),
        (["--break-even", "maybe"], "maybe is neither on nor off"),
        (["--new-between", "-1"], "-1 is less than 0"),
    ],
)
def test_options_that_would_measure_something_else_are_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        test_busy.main([*argv, "--memory", "1MiB"])  # nothing starts if it is not refused
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_plan_is_refused_before_any_process_is_started():
    with pytest.raises(ConfigError):
        plan("--input-len", "64")


def test_without_room_for_the_engines_the_row_is_skipped_with_the_reason(tmp_path: Path):
    file = tmp_path / "a.json"
    assert test_busy.main(["--memory", "1MiB", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["skipped"].startswith("needs ")
