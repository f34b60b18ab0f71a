"""What the benchmark of a busy engine makes of its answers and counters. No engine is started."""

import pytest

from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.remote_kv_cache import test_busy
from benchmarks.remote_kv_cache.busy import plan as busy_plan
from benchmarks.remote_kv_cache.busy import results
from benchmarks.remote_kv_cache.busy.plan import BLOCK_TOKENS, Plan
from benchmarks.remote_kv_cache.busy.results import NONE, OFF, ON, Answers, Counted, Key, Trial
from examples.engine import Completion

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
    assert "<svg" in results.chart(record).svg()


def test_rounds_that_only_one_of_two_engines_has_are_not_compared():
    mine, bare = [trial(answer())] * 3, [trial(answer())]
    assert results.compared(mine, bare) == Answers(equal=1)
    (figure,) = results.figures_of(Key(0.0, 1, ON), Sample([1.0] * 3), mine, [], BLOCK_TOKENS)
    record = Record("b", "c", figures=[figure])
    assert "not compared" in results.describe(record)


@pytest.mark.parametrize("key", [Key(0.0, 32, NONE), Key(50.0, 4, ON), Key(0.5, 1, OFF)])
def test_a_cell_is_found_again_by_its_name(key: Key):
    assert Key.read(str(key)) == key


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
    warm = [request for engine in made.engines for request in made.warm(engine)]
    asked = [*made.all_held(), *new, *made.fillers(), *warm]
    assert len(new) == 2 * 2 * 5 * 3
    assert len({tuple(request.prompt) for request in asked}) == len(asked)


def test_the_pool_and_the_engines_cache_are_smaller_than_what_pushes_the_prompts_out():
    made = plan()
    filled = len(made.fillers()) * made.blocks * made.row_bytes
    assert filled > made.cpu_pool > made.kv_cache


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--input-len", "768"], "--input-len 768: a multiple of the 32 tokens"),
        (["--depths", "40"], "--cpu-pool has 1,706 rows, and the deepest queue has 1,920"),
        (["--depths", "32", "--new-between", "2"], "the deepest queue has 2,304"),
        (["--kv-cache", "1MiB"], "--kv-cache has 10 blocks, and 4 requests at a time need 100"),
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
