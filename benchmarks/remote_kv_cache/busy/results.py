"""Shares, figures, a table and a plot from the busy engines' answers and counters."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from benchmarks.engine.kinds import model_of
from benchmarks.harness import plot, table, titles
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Sample
from benchmarks.harness.statistics import percentile
from examples.engine import Completion, tokens_by_level

NONE, ON, OFF = "no connector", "break-even on", "break-even off"

_NOT_USED = {
    "kvferry_missed_blocks_total": "missed",
    "kvferry_loaded_blocks_total": "load",
    "kvferry_declined_blocks_total": "declined",
}
"""Metrics of blocks that the connector did not load or store, and their names in the table."""

_LABEL = re.compile(r'(?:reason|outcome)="([^"]*)"')
_LANDED = "hit"
"""The outcome of a load whose block was used."""


class Key(NamedTuple):
    """One cell. `step_ms` 0: steps at full speed."""

    step_ms: float
    depth: int
    """Prompts on the server that are sent at once."""

    engine: str

    def __str__(self) -> str:
        return f"steps {self.steps}, {self.depth} prompts, {self.engine}"

    @property
    def steps(self) -> str:
        return f"of {self.step_ms:g} ms" if self.step_ms else "as they come"

    @classmethod
    def read(cls, text: str) -> Self:
        steps, prompts, engine = text.removeprefix("steps ").split(", ")
        step_ms = 0.0 if steps == "as they come" else float(steps.split()[1])
        return cls(step_ms, int(prompts.split()[0]), engine)


@dataclass(frozen=True)
class Counted:
    """Differences of an engine's `/metrics` counters between two reads."""

    by_level: Mapping[str, int]
    """Prompt tokens that were not computed, by level."""

    loaded_blocks: int
    """Blocks loaded from the server and used."""

    not_used: Mapping[str, int]
    """Blocks that the connector did not load from the server or store there, by reason."""

    hook_errors: int = 0

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Self:
        """`before` and `after` are samples of one engine, as `VllmServer.metrics` has them."""
        first, last = tokens_by_level(before), tokens_by_level(after)
        loaded, errors = 0, 0
        not_used: dict[str, int] = {}
        for sample, value in after.items():
            grown = round(value - before.get(sample, 0))
            name, _, labels = sample.partition("{")
            if name == "kvferry_hook_errors_total":
                errors += grown
            elif name in _NOT_USED and grown:
                found = _LABEL.search(labels)
                reason = found[1] if found else ""
                if name == "kvferry_loaded_blocks_total" and reason == _LANDED:
                    loaded += grown
                else:
                    called = f"{_NOT_USED[name]}: {reason}"
                    not_used[called] = not_used.get(called, 0) + grown
        by_level = {level: last[level] - first[level] for level in last}
        return cls(by_level, loaded, not_used, errors)

    def problem(self, block_tokens: int) -> str:
        """Why these counts are invalid for the cell; empty when they are valid."""
        if self.hook_errors:
            return f"{self.hook_errors} exceptions in hooks"
        if self.by_level["engine"]:
            return f"{self.by_level['engine']:,} tokens were in the engine's own cache"
        if self.hit_tokens > self.loaded_blocks * block_tokens:
            return (
                f"{self.hit_tokens:,} tokens were found and {self.loaded_blocks:,} blocks loaded: "
                "some were in the pool before"
            )
        return ""

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens from the server. vLLM counts a block as the pool's once it has been there
        for some time; nothing else of these prompts was in the pool."""
        return self.by_level["pool"] + self.by_level["server"]


@dataclass(frozen=True)
class Trial:
    """One queue of prompts on one engine."""

    held: Sequence[Completion]
    """Answers to the prompts on the server, in the order of sending."""

    new: Sequence[Completion]
    """Answers to the new prompts in between."""

    seconds: float
    """Until the last answer."""

    counted: Counted

    @property
    def all(self) -> list[Completion]:
        return [*self.held, *self.new]


def rows_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Tokens of a prompt in complete rows, the most that a server can provide."""
    return prompt_tokens // block_tokens * block_tokens


class Answers(NamedTuple):
    """Counts of answers, compared with those of the engine without a connector."""

    equal: int = 0
    tied: int = 0
    """Different from a token on that the engine without a connector rated as equal: see
    `examples.engine.TIED`."""

    wrong: int = 0

    @property
    def compared(self) -> int:
        return sum(self)


def compared(trials: Sequence[Trial], reference: Sequence[Trial]) -> Answers:
    """Compare the held prompts' answers with those without a connector, in common rounds."""
    verdicts: Counter[str] = Counter(
        mine.compared_with(theirs)
        for one, other in zip(trials, reference, strict=False)
        for mine, theirs in zip(one.held, other.held, strict=True)
    )
    return Answers(verdicts["equal"], verdicts["tied"], verdicts["wrong"])


def judged(sample: Sample, trials: Sequence[Trial], reference: Sequence[Trial]) -> Sample:
    """The cell's sample, FAILED when an answer differs from that without a connector."""
    answers = compared(trials, reference)
    if answers.wrong and not sample.failed:
        why = f"{answers.wrong} of {answers.compared} answers differ from those without a connector"
        return Sample(sample.values, sample.warm_ups, sample.skipped, why)
    return sample


def figures_of(
    key: Key, sample: Sample, trials: Sequence[Trial], reference: Sequence[Trial], block_tokens: int
) -> list[Figure]:
    """All figures of one cell over its timed rounds; empty without rounds."""
    warm_ups = len(sample.warm_ups)
    measured = trials[warm_ups:][: len(sample.values)]
    if not sample.measured or not measured:
        return []
    answers = [answer for trial in measured for answer in trial.all]
    held = [answer for trial in measured for answer in trial.held]
    seconds = sum(trial.seconds for trial in measured)
    rows = sum(rows_tokens(answer.prompt_tokens, block_tokens) for answer in held)
    firsts = [answer.ttft_s for answer in held]
    answers_of = compared(trials, reference)
    values = {
        "from the server": 100 * sum(t.counted.hit_tokens for t in measured) / rows,
        "prompts a second": len(answers) / seconds,
        "output tokens a second": sum(len(answer.token_ids) for answer in answers) / seconds,
        "first token p50": percentile(firsts, 50),
        "first token max": max(firsts),
        "answers equal": float(answers_of.equal),
        "answers tied": float(answers_of.tied),
    }
    for trial in measured:
        for reason, blocks in trial.counted.not_used.items():
            values[reason] = values.get(reason, 0.0) + blocks
    return [Figure(str(key), "", values)]


def cells(record: Record) -> dict[Key, Mapping[str, float]]:
    """The figures, by cell."""
    return {Key.read(figure.name): figure.values for figure in record.figures}


def describe(record: Record) -> str:
    """A line for each cell, or the reason for none."""
    found = cells(record)
    lines: list[list[table.Cell]] = []
    for key, values in found.items():
        bare = found.get(key._replace(engine=NONE))
        times = values["prompts a second"] / bare["prompts a second"] if bare else None
        lines.append([
            key.steps, key.depth, key.engine,
            None if key.engine == NONE else f"{values['from the server']:.1f}",
            values["prompts a second"], None if times is None else f"{times:.2f}",
            values["output tokens a second"],
            values["first token p50"], values["first token max"], _equal(key, values),
            ", ".join(f"{reason} {values[reason]:.0f}" for reason in values if ": " in reason),
        ])  # fmt: skip
    headers = ["steps", "prompts", "engine", "server, %", "prompts/s", "to none", "output tok/s",
               "first p50, s", "first max, s", "answers", "not used, blocks"]  # fmt: skip
    text = [table.render(headers, lines)] if lines else []
    text += [f"{row.operation}: {row.reason}" for row in record.rows if row.reason]
    return "\n".join(text)


def _equal(key: Key, values: Mapping[str, float]) -> str | None:
    if key.engine == NONE:
        return None
    equal, tied = int(values["answers equal"]), int(values["answers tied"])
    if not equal + tied:
        return "not compared"
    return f"{equal} equal" + (f", {tied} tied" if tied else "")


def chart(record: Record) -> plot.Chart:
    """The share of blocks from the server against the number of prompts sent at once, a line for
    each connector and length of steps."""
    found = {key: each for key, each in cells(record).items() if key.engine != NONE}
    depths = sorted({key.depth for key in found})
    series: dict[str, list[float | None]] = {}
    for step_ms, engine in dict.fromkeys((key.step_ms, key.engine) for key in found):
        values = [found.get(Key(step_ms, depth, engine)) for depth in depths]
        name = f"steps {Key(step_ms, 0, engine).steps}, {engine}"
        series[name] = [v["from the server"] if v else None for v in values]
    title = titles.of(record, f"{model_of(record)}, a busy engine")
    return plot.lines(
        title, "% of complete rows that the server gave", [str(depth) for depth in depths], series,
        x_unit="prompts asked at once, all of them on the server",
    )  # fmt: skip


def row_values(sample: Sample, trials: Sequence[Trial]) -> Sample:
    """Seconds from the first request to the last answer, without the frame of a trial."""
    values = [trial.seconds for trial in trials]
    if not sample.measured:
        return sample
    warm_ups = len(sample.warm_ups)
    return Sample(values[warm_ups:][: len(sample.values)], values[:warm_ups])
