"""An engine benchmark on a machine that does not do its part: rows with reasons, in a record."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.engine.driver import EngineFailed
from benchmarks.engine.session import conduct
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Case, NotJudged, Runner, Skipped, WrongBytes, in_words
from benchmarks.remote_kv_cache.baseline import test_engine_cost as engine_cost
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import BLOCK_TOKENS, Step
from benchmarks.remote_kv_cache.baseline.test_engine_cost import NUM_REQUESTS, OF_THE_MACHINE
from examples import tiny_model
from kv_connector.tier.lookup_state import Missed

BLOCKS_OF_A_PROMPT = engine_cost.PROMPT_TOKENS // BLOCK_TOKENS


def bare() -> None:
    raise AssertionError


def raiser(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FAILURES: list[tuple[Callable[[], None], str]] = [
    (bare, "FAILED: AssertionError: test_engines_that_fail.py, line "),
    (raiser(RuntimeError("the engine core died")), "FAILED: RuntimeError: the engine core died"),
    (raiser(WrongBytes("block 3")), "FAILED: WrongBytes: block 3"),
    (raiser(EngineFailed("no answer")), "FAILED: no answer"),
    (raiser(NotJudged("late")), "SKIPPED: not judged: late"),
    (raiser(Skipped("no vLLM")), "SKIPPED: no vLLM"),
]


@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize(("fail", "reason"), FAILURES)
def test_what_fails_outside_of_a_trial_is_a_row_beside_those_before_it(
    fail: Callable[[], None], reason: str, at_the_end: bool
):
    record, runner = Record("b", "c"), Runner(1, 0)

    def measure(stack: ExitStack) -> None:
        record.figures.append(Figure("before", "us", {"cost": 1.0}))
        if at_the_end:
            stack.callback(fail)
        else:
            fail()

    conduct(record, runner, "small", "idle", 0, None, measure)
    (row,) = record.rows
    assert row.reason.startswith(reason)
    assert bool(runner.num_failed) == reason.startswith("FAILED")
    assert len(record.figures) == 1


def test_a_bare_assertion_in_a_trial_has_its_place_and_its_line():
    with Runner(1, 0) as runner:
        (sample,) = runner.measure("title", [Case("a", bare)]).values()
    assert sample.failed is not None and sample.failed.endswith(": raise AssertionError")
    assert in_words(AssertionError()) == "AssertionError"


class FakeEngine:
    """Steps without a model. `plan` is what goes wrong."""

    def __init__(self, plan: str, *_: object, **__: object) -> None:
        if plan == "start":
            bare()
        self.plan = plan
        self.decoding = 0
        self.steps = self.loaded = self.prompts = 0
        self.started = False

    def add(self, name: str, prompt: object, max_tokens: int) -> None:
        if name.startswith("returns"):
            self.prompts += 1
            self.loaded += BLOCKS_OF_A_PROMPT - (self.plan in ("late", "absent"))
        elif name.startswith("decode"):
            self.decoding += 1
            self.started = True

    def step(self) -> Step:
        self.steps += 1
        if self.plan == "step" and self.started:
            bare()
        if self.plan == "ended while running" and self.steps > engine_cost.SETTLING_STEPS + 2:
            self.decoding = NUM_REQUESTS - 1
        return Step(0.01, 0.0001, 0.0001, 0.0)

    def finish(self) -> None:
        if self.plan == "finish":
            raise NotJudged("the engine has 1 requests after 300 s")

    def empty(self) -> None:
        self.decoding = self.steps = 0

    @property
    def num_running(self) -> int:
        return self.decoding - (self.plan == "ended while queued")

    @property
    def num_unfinished(self) -> int:
        return self.num_running

    def blocks_from_server(self) -> int:
        return self.loaded

    def misses(self) -> dict[str, int]:
        reason = "lookup_late" if self.plan == "late" else "absent"
        return {reason: self.prompts}

    def hook_errors(self) -> int:
        return int(self.plan == "hook")

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.plan == "close":
            bare()


class FakeServer:
    endpoint = "tcp://127.0.0.1:1"

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None: ...


def ran(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, str]]:
    """The exit status, and the reason of each row of the record by its operation."""
    monkeypatch.setattr(engine_cost, "SteppedEngine", lambda *args, **_: FakeEngine(plan, *args))
    monkeypatch.setattr(engine_cost, "RemoteServer", FakeServer)
    monkeypatch.setattr(engine_cost, "TRANSPORTS", ())
    monkeypatch.setattr(tiny_model, "build", lambda *_: tmp_path)
    monkeypatch.setattr(engine_cost, "_NEEDED", 0)
    file = tmp_path / "record.json"
    arguments = ["--steps", "4", "--every", "2", "--trials", "2", "--warm-ups", "0"]
    status = engine_cost.main([*arguments, "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    return status, {row["operation"]: row.get("failed") or row.get("skipped") or "" for row in rows}


def test_an_engine_that_does_its_part_has_rows_without_a_reason(tmp_path, monkeypatch):
    status, rows = ran("", tmp_path, monkeypatch)
    assert status == 0 and len(rows) == 12 and not any(rows.values())


@pytest.mark.parametrize(
    ("plan", "status", "operation", "words"),
    [
        ("start", 1, "idle client", "AssertionError: test_engines_that_fail.py, line"),
        ("close", 1, "idle client", "AssertionError: test_engines_that_fail.py, line"),
        ("step", 1, "idle client: engine step, median", "AssertionError: test_engines_that"),
        ("finish", 0, "idle client", "not judged: the engine has 1 requests"),
        ("ended while queued", 0, "idle client: engine step, median", "not judged: 3 of 4"),
        ("ended while running", 0, "idle client: engine step, median", "not judged: 3 of 4"),
        ("late", 0, "prompts return: engine step, median", "misses: {'lookup_late': 2}"),
        ("absent", 1, "prompts return: engine step, median", "254 of 256 blocks"),
        ("hook", 1, "prompts return: engine step, median", "1 exceptions in hooks"),
    ],
)
def test_whatever_goes_wrong_is_a_row_with_its_reason_in_a_record(
    plan, status, operation, words, tmp_path, monkeypatch
):
    ended, rows = ran(plan, tmp_path, monkeypatch)
    assert ended == status
    assert words in rows[operation]


def test_the_misses_of_a_busy_machine_are_reasons_of_a_miss():
    assert {*map(str, Missed)} >= OF_THE_MACHINE
