"""Rows, figures and a table of the steps of a returning prompt, by length and phase."""

import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Sample
from benchmarks.harness.summary import summarize
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import BLOCK_TOKENS, Step

ASKS = "first step"
NO_ANSWER = "no answer yet"
ANSWERED = "answers used"
AGAIN = "looks again"
LOADING = "load under way"
ADMITS = "load in"
PHASES = (ASKS, NO_ANSWER, ANSWERED, LOADING, AGAIN, ADMITS)
"""The phases of a prompt's way into the engine, in order. vLLM walks over all keys in `ASKS`,
`ANSWERED`, `AGAIN` and `ADMITS`. A short load ends before any step of `LOADING`, and a prompt that
arrives in one load has no `AGAIN`."""

WALKS_WITH_ANSWERS = (ANSWERED, AGAIN, ADMITS)

GOAL_US = 1.5
"""Goal: the most microseconds a block of our share of a walk, once the answers have arrived."""

TIMER = "the timer itself, a nested call"

Trial = Mapping[str, Sequence[Step]]
"""The steps of one prompt's way, by phase. A phase without a step is missing."""

NET = "ours, less the timer"
WALK = "ours in the walk, less the timer"
STEP, OURS, VLLMS, RUNNING = "engine step", "ours", "vLLM's", "both, CPU"

_PICK: dict[str, Callable[[Step], float]] = {
    STEP: lambda step: step.seconds,
    OURS: lambda step: step.ours,
    VLLMS: lambda step: step.vllms,
    RUNNING: lambda step: step.ours + step.vllms - step.waiting,
}
_A_BLOCK = (WALK, NET, VLLMS, RUNNING)  # in the table


def by_phase(steps: Sequence[Step]) -> Trial:
    """Group the steps of one prompt by phase, from its arrival to its admission."""
    trial: dict[str, list[Step]] = {}
    for step in steps:
        if ASKS not in trial:
            phase = ASKS
        elif ANSWERED not in trial:
            phase = ANSWERED if step.walks else NO_ANSWER
        else:
            phase = ADMITS if step.admits else AGAIN if step.walks else LOADING
        trial.setdefault(phase, []).append(step)
    return trial


def rows_of(model: str, length: int, sample: Sample, trials: Sequence[Trial]) -> list[Row]:
    """One row for each phase and time; one value a trial, the median of its steps.

    A length that failed or was skipped has one row with the reason.
    """
    if not sample.measured:
        return [Row(model, operation(length, ASKS, STEP), 0, sample)]
    return [
        Row(model, operation(length, phase, what), 0, Sample(values))
        for phase in PHASES
        for what in _PICK
        if (values := _values(trials, phase, what))
    ]


def operation(length: int, phase: str, what: str) -> str:
    """The name of a row: `32,768 tokens, no answer yet: ours`."""
    return f"{_name(length, phase)}: {what}"


def figures_of(
    length: int, sample: Sample, trials: Sequence[Trial], charged_s: float
) -> list[Figure]:
    """Medians of the trials for each block of the prompt, and the number of steps of a phase.

    `charged_s` is the cost of timing charged to each call of our hooks; `NET` and `WALK` exclude
    it. `WALK` is inside `get_num_new_matched_tokens`, so it is only our share of a walk.
    """
    if not sample.measured:
        return []
    figures = []
    num_blocks = length // BLOCK_TOKENS
    for phase in PHASES:
        counts = [len(trial[phase]) for trial in trials if trial.get(phase)]
        if not counts:
            continue
        a_block = {what: _median(_values(trials, phase, what)) * 1e6 / num_blocks for what in _PICK}
        calls = _median([_median([step.calls for step in trial[phase]])
                         for trial in trials if trial.get(phase)])  # fmt: skip
        a_block[NET] = max(0.0, a_block[OURS] - calls * charged_s * 1e6 / num_blocks)
        a_block[WALK] = _median([
            _median([step.walk_s - step.walk_calls * charged_s for step in trial[phase]])
            for trial in trials if trial.get(phase)
        ]) * 1e6 / num_blocks  # fmt: skip
        figures.append(Figure(_name(length, phase), "us a block", a_block))
        steps = {"median": _median(counts), "max": max(counts)}
        figures.append(Figure(f"{_name(length, phase)}: steps", "steps", steps))
    return figures


def describe(record: Record, lengths: Sequence[int]) -> str:
    """One line for each length and phase, the reasons for missing rows, and the goal."""
    lines: list[list[table.Cell]] = []
    verdicts = []
    for length in lengths:
        for phase in PHASES:
            a_block = _figure(record, _name(length, phase))
            if a_block is None:
                continue
            steps = _figure(record, f"{_name(length, phase)}: steps") or {}
            ms = [_ms(record, length, phase, what) for what in _PICK]
            us = [a_block[what] for what in _A_BLOCK]
            lines.append([f"{length:,}", phase, int(steps["median"]), *ms, *us])
            if phase in WALKS_WITH_ANSWERS:
                verdict = "met" if us[0] <= GOAL_US else "NOT met"
                verdicts.append(f"{_name(length, phase)}: {us[0]:.2f} us, {verdict}")
    headers = ["tokens", "", "steps", *(f"{what}, ms" for what in _PICK),
               *(f"{what}, us a block" for what in _A_BLOCK)]  # fmt: skip
    text = [table.render(headers, lines)] if lines else []
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    if (timer := _figure(record, TIMER)) is not None:
        charged = max(timer.values())
        text.append(f"the timer charges {charged:.2f} us to each call of a hook")
    if verdicts:
        text += [f"our share of a walk at most {GOAL_US:g} us a block:", *verdicts]
    return "\n".join(text)


def chart(record: Record) -> plot.Chart:
    """Our share of each phase's walk, a block, by length, with the goal as a mark."""
    lengths = lengths_of(record)
    series = {
        phase: [(_figure(record, _name(length, phase)) or {}).get(WALK) for length in lengths]
        for phase in PHASES
    }
    names = [f"{length:,} tokens" for length in lengths]
    title = titles.of(record, "our share of a walk")
    return plot.bars(title, "us a block", names, series, mark=GOAL_US)


def _median(values: Sequence[float]) -> float:
    return summarize(values).median


def lengths_of(record: Record) -> list[int]:
    """The measured lengths of a prompt, in order."""
    found = (re.match(r"([\d,]+) tokens, ", figure.name) for figure in record.figures)
    return [*dict.fromkeys(int(match[1].replace(",", "")) for match in found if match)]


def _name(length: int, phase: str) -> str:
    return f"{length:,} tokens, {phase}"


def _values(trials: Sequence[Trial], phase: str, what: str) -> list[float]:
    return [
        _median([_PICK[what](step) for step in trial[phase]])
        for trial in trials
        if trial.get(phase)
    ]


def _figure(record: Record, name: str) -> Mapping[str, float] | None:
    return next((figure.values for figure in record.figures if figure.name == name), None)


def _ms(record: Record, length: int, phase: str, what: str) -> float | None:
    name = operation(length, phase, what)
    seconds = next((row.seconds for row in record.rows if row.operation == name), None)
    return None if seconds is None else seconds * 1e3
