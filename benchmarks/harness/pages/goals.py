"""The goals of each benchmark, and which of them its committed records meet.

`benchmarks/goals.toml` has them by the benchmark's name:

    [[test_disk]]
    goal = "the disk tier's speed, of a raw loop with four threads"
    records = ["test_disk.json"]
    rows = 'disk tier: (?P<way>.+)'          a row's whole operation
    base = 'raw loop, 4 threads: {way}'      the row of the same model and rounds; `wall` is its own
    at_least = 0.9

Rows are compared with their base round by round, as `compare_pairs` does, and judged by the
interval of the median: `at_least` is a part of the base's speed, `at_most` a multiple of its time.
A figure is judged by its value named `value`, with its interval where the record has one, and else
as the one number of a run.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.statistics import LEAST_ROUNDS, compare_pairs, judge
from benchmarks.harness.table import digits

VERDICTS = MET, MISSED, NOT_JUDGED = "met", "missed", "not judged"

HEADS = ("goal", *VERDICTS, "measured", "missed by")

WALL = "wall"
_WORDS = {"met": MET, "NOT met": MISSED}


class Goal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `goals.toml`."""

    goal: str
    records: list[str]
    rows: str = ""
    base: str = ""
    transport: str = ""
    integrity: bool | None = None
    """Only rows and figures of this transport, only rows of this integrity; empty and absent: of
    all."""

    figures: str = ""
    value: str = ""
    criteria: bool = False
    """The criteria of the program's own verdict, which its record has."""

    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def __post_init__(self) -> None:
        if self.criteria:
            return
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.goal}: one of at_most and at_least")
        if bool(self.rows) == bool(self.figures) or bool(self.rows) != bool(self.base):
            raise ValueError(f"{self.goal}: rows and their base, or figures")
        try:
            found = re.compile(self.rows or self.figures)
            self.base.format(**dict.fromkeys(found.groupindex, ""))
        except (re.error, LookupError, ValueError) as error:
            raise ValueError(f"{self.goal}: its pattern or its base: {error!r}") from None

    @property
    def bound(self) -> str:
        """As in `at most 1.5 us`."""
        if self.criteria:
            return "passed"
        words = ("at most", self.at_most) if self.at_least is None else ("at least", self.at_least)
        return f"{words[0]} {words[1] or 0:,.10g}{f' {self.unit}' if self.unit else ''}"

    def judged(self, low: float, high: float, rounds: int) -> str:
        """`met`, `missed`, or `not judged`, by the interval of a median over `rounds`."""
        at_most = self.at_least is None
        goal = self.at_most if self.at_least is None else self.at_least
        assert goal is not None
        return _WORDS.get(judge(low, high, rounds, goal=goal, at_most=at_most), NOT_JUDGED)


class Result(NamedTuple):
    """One measurement beside its goal."""

    name: str
    value: float | None
    """None for a criterion, whose name has it."""

    verdict: str


def read(path: Path) -> Mapping[str, list[Goal]]:
    """By the benchmark's name. Raises `msgspec.DecodeError`."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, list[Goal]])


def results(goal: Goal, record: Record) -> Iterator[Result]:
    """What `record` has for the goal; nothing where it was not measured."""
    if goal.criteria:
        for one in record.parameters.get("verdict", {}).get("criteria", ()):
            yield Result(f"{one['name']} ({one['note']})", None, MET if one["passed"] else MISSED)
    elif goal.figures:
        for figure in record.figures:
            is_one = re.fullmatch(goal.figures, figure.name)
            if is_one and goal.transport in ("", figure.transport):
                yield from _of_figure(goal, figure, record)
    else:
        for row in record.rows:
            match = re.fullmatch(goal.rows, row.operation)
            if match and goal.transport in ("", row.transport):
                yield from _of_row(goal, row, _base_of(goal, row, match, record))


def _of_figure(goal: Goal, figure: Figure, record: Record) -> Iterator[Result]:
    value = figure.values.get(goal.value)
    if value is None:
        return
    low, high, rounds = (
        figure.values.get(f"{goal.value}, {name}", figure.values.get(name))
        for name in ("low", "high", "rounds")
    )
    if rounds is None:
        of = (row.sample.values for row in record.rows if row.operation == figure.name)
        rounds = len(next(of, [])) or None
    # The one number of a run is no median: it has no rounds to judge it by.
    count = LEAST_ROUNDS if low is None or rounds is None else int(rounds)
    verdict = goal.judged(value if low is None else low, value if high is None else high, count)
    where = f", {figure.transport}" if figure.transport else ""
    yield Result(f"{figure.name}{where}", value, verdict)


def _of_row(goal: Goal, row: Row, base: Row | None) -> Iterator[Result]:
    if goal.integrity is not None and row.integrity is not goal.integrity:
        return
    where = f", {row.transport}" if row.transport else ""
    if row.sample.failed is not None:
        yield Result(f"{row.model}, {row.operation}{where}: FAILED", None, MISSED)
    if base is None or not base.sample.measured or not row.sample.measured:
        return
    rounds = min(len(base.sample.values), len(row.sample.values))
    first, second = base.sample.values[:rounds], row.sample.values[:rounds]
    faster = compare_pairs(first, second) if goal.at_most is None else compare_pairs(second, first)
    verdict = goal.judged(faster.low, faster.high, rounds)
    yield Result(f"{row.model}, {row.operation}{where}", faster.ratio, verdict)


def _base_of(goal: Goal, row: Row, match: re.Match[str], record: Record) -> Row | None:
    same = [each for each in record.rows if each.model == row.model]
    if goal.base == WALL:
        return next((e for e in same if f"{e.operation}, {e.transport}" == row.wall), None)
    name = goal.base.format(**match.groupdict())
    named = [each for each in same if each.operation == name]
    # A base that was measured over several transports is that of the row's own.
    return next(
        (each for each in named if each.transport == row.transport), next(iter(named), None)
    )


def counted(goals: Sequence[Goal], records: Mapping[str, Record]) -> dict[str, int]:
    """How many measurements have each verdict."""
    got = [one.verdict for goal in goals for name in goal.records
           for one in results(goal, records[name])]  # fmt: skip
    return {word: got.count(word) for word in VERDICTS}


def lines(goals: Sequence[Goal], records: Mapping[str, Record]) -> list[list[str]]:
    """A line for each goal: the goal, how many measurements meet it, miss it, are not judged, the
    least and the most that was measured, and those that miss it by name."""
    found = []
    for goal in goals:
        got = [result for name in goal.records for result in results(goal, records[name])]
        verdicts = [one.verdict for one in got]
        values = [one.value for one in got if one.value is not None]
        missed = [_named(one) for one in got if one.verdict == MISSED]
        found.append([
            f"{goal.goal}: {goal.bound}", *(f"{verdicts.count(word) or ''}" for word in VERDICTS),
            _range(values, measured=bool(got)), _some(missed),
        ])  # fmt: skip
    return found


def _named(result: Result) -> str:
    return result.name if result.value is None else f"{result.name}: {digits(result.value)}"


def _range(values: Sequence[float], *, measured: bool) -> str:
    if not values:
        return "" if measured else "not measured"
    low, high = digits(min(values)), digits(max(values))
    return low if low == high else f"{low} to {high}"


def _some(names: Sequence[str]) -> str:
    shown = "; ".join(names[:3])
    return f"{shown}; and {len(names) - 3} more" if len(names) > 3 else shown
