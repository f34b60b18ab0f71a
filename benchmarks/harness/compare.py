"""The verdict on two records of one benchmark."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import statistics, table
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.summary import summarize

SLOWER = "slower"

METHOD = "verdicts: the Mann-Whitney test at 5 %, of a difference of 2 % or more"

_DURATION = re.compile(r"(?<!/)\b(ms|us|µs|s)\b")
"""In the name or unit of a figure whose smaller values are better; others are rates."""


_NO_DURATION = "a round is no number above 0"


class ComparedRecords(NamedTuple):
    """`text` is for display; `comparable` is False when the records are of different machines."""

    comparable: bool
    text: str
    verdicts: dict[tuple[str, str, str | None, bool | None], str]
    slower: Sequence[str] = ()
    """The rows and figures that are significantly slower in the second record."""

    failed: Sequence[str] = ()
    """The rows that were measured in the first record and `FAILED` in the second."""


def compare_records(before: Record, after: Record, *, ratios: bool = False) -> ComparedRecords:
    """Compare the rows that both have. With `ratios`, in units of each run's own memcpy. Figures
    are printed side by side."""
    if before.benchmark != after.benchmark:
        return _refused(f"different benchmarks: {before.benchmark} and {after.benchmark}")
    cpus = [record.host.get("cpu") for record in (before, after)]
    other_cpu = None not in cpus and cpus[0] != cpus[1]
    if dict(before.machine) != dict(after.machine) or other_cpu:
        named = [
            f"{record.describe_machine()}{f', {cpu}' if other_cpu else ''}"
            for record, cpu in zip((before, after), cpus, strict=True)
        ]
        return _refused(f"different machines, not compared: {named[0]} and {named[1]}")
    later = {row.identity: row for row in after.rows}
    lines: list[list[table.Cell]] = []
    verdicts = {}
    failed = []
    for row in before.rows:
        other = later.pop(row.identity, None)
        if other is not None and other.sample.failed is not None and row.sample.measured:
            failed.append(_in_words(row.identity))
        line, verdicts[row.identity] = _judge(row, other, ratios)
        lines.append(line)
    for row in later.values():
        verdicts[row.identity] = "only in the second"
        lines.append([*_names(row), None, row.seconds, None, verdicts[row.identity]])
    unit = "memcpys" if ratios else "seconds"
    headers = ["model", "operation", "transport", "integrity", f"before ({unit})",
               f"after ({unit})", "before/after", "verdict"]  # fmt: skip
    figures, slower_figures = _figures(before.figures, after.figures)
    slower = [_in_words(key) for key, verdict in verdicts.items() if verdict.endswith(SLOWER)]
    slower += slower_figures
    parts = [table.render(headers, lines)] if lines or not figures else []
    parts += [*figures,
              *_changes("command", {"": before.command}, {"": after.command}),
              *_changes("version", before.versions, after.versions),
              *_known_changes("source", before.source, after.source),
              *_known_changes("host", before.host, after.host),
              *_known_changes("storage", before.storage, after.storage),
              *_changes("parameter", before.parameters, after.parameters)]  # fmt: skip
    parts += [
        f"interrupted: the {name} record has only the trials before it"
        for name, record in (("first", before), ("second", after))
        if record.interrupted
    ]
    if slower:
        parts.append(f"slower in the second: {'; '.join(slower)}")
    if failed:
        parts.append(f"FAILED in the second: {'; '.join(failed)}")
    return ComparedRecords(True, "\n".join(parts), verdicts, slower, failed)


def _in_words(key: tuple[str, str, str | None, bool | None]) -> str:
    integrity = {True: "checksums on", False: "checksums off", None: None}[key[3]]
    return ", ".join(part for part in (*key[:3], integrity) if part)


def _refused(reason: str) -> ComparedRecords:
    return ComparedRecords(False, reason, {})


def _judge(row: Row, other: Row | None, ratios: bool) -> tuple[list[table.Cell], str]:
    if other is None:
        return [*_names(row), row.seconds, None, None, "only in the first"], "only in the first"
    if row.num_bytes != other.num_bytes:
        verdict = "different amounts, not compared"
        return [*_names(row), row.seconds, other.seconds, None, verdict], verdict
    first, second = _values(row, ratios), _values(other, ratios)
    if not first or not second:
        verdict = f"not compared: {row.reason or other.reason or 'no ratio to a memcpy'}"
        return [*_names(row), row.seconds, other.seconds, None, verdict], verdict
    if not statistics.are_durations([*first, *second]):
        verdict = f"not compared: {_NO_DURATION}"
        return [*_names(row), row.seconds, other.seconds, None, verdict], verdict
    found = statistics.compare(first, second)
    verdict = found.verdict
    if (few := min(len(first), len(second))) < statistics.LEAST_TO_DIFFER:
        verdict = f"not judged: {few} trials, and a difference takes {statistics.LEAST_TO_DIFFER}"
    medians = [summarize(values).median for values in (first, second)]
    interval = f"{found.ratio:.2f} ({found.low:.2f} to {found.high:.2f})"
    return [*_names(row), *medians, interval, verdict], verdict


def _figures(before: Sequence[Figure], after: Sequence[Figure]) -> tuple[list[str], list[str]]:
    """A table of the numbers that both have, with a note on its limits; empty without figures. And
    the figures that are slower in the second."""
    first, second = _numbers(before), _numbers(after)
    rounds = _rounds(before), _rounds(after)
    slower: list[str] = []
    lines: list[list[table.Cell]] = []
    for names in dict.fromkeys([*first, *second]):
        was, now = first.get(names), second.get(names)
        change = f"{100 * (now / was - 1):+.1f} %" if was and now is not None else None
        verdict = _of_rounds(names, rounds[0].get(names, ()), rounds[1].get(names, ()))
        if verdict.endswith(SLOWER):
            slower.append(", ".join(part for part in names[:3] if part))
        lines.append([*names, was, now, change, verdict])
    if not lines:
        return [], []
    headers = ["figure", "of", "transport", "unit", "before", "after", "change", "verdict"]
    notes = [METHOD] if any(rounds) else []
    if any(not line[-1] for line in lines):
        notes.append("without a verdict: one number of each run, which has no spread")
    return [table.render(headers, lines), *notes], slower


def _of_rounds(
    names: tuple[str, str, str | None, str], before: Sequence[float], after: Sequence[float]
) -> str:
    """The verdict on a figure's rounds, which are durations or rates by its name and unit. Empty
    where a record has no rounds of it."""
    if not before or not after:
        return ""
    if (few := min(len(before), len(after))) < statistics.LEAST_TO_DIFFER:
        return f"not judged: {few} rounds, and a difference takes {statistics.LEAST_TO_DIFFER}"
    if not statistics.are_durations([*before, *after]):
        return f"not judged: {_NO_DURATION}"
    is_duration = _DURATION.search(f"{names[1]}, {names[3]}") is not None
    if not is_duration:
        before, after = ([1 / value for value in values] for values in (before, after))
    return statistics.compare(before, after).verdict


def _rounds(figures: Sequence[Figure]) -> dict[tuple[str, str, str | None, str], Sequence[float]]:
    return {
        (figure.name, of, figure.transport, figure.unit): values
        for figure in figures
        for of, values in figure.rounds.items()
    }


def _numbers(figures: Sequence[Figure]) -> dict[tuple[str, str, str | None, str], float]:
    return {
        (figure.name, of, figure.transport, figure.unit): value
        for figure in figures
        for of, value in figure.values.items()
        if isinstance(value, (int, float))
    }


def _values(row: Row, ratios: bool) -> Sequence[float]:
    if not row.sample.measured or not ratios:
        return row.sample.values if row.sample.measured else []
    if row.ratio_to_memcpy is None or not row.seconds:
        return []
    return [value * row.ratio_to_memcpy / row.seconds for value in row.sample.values]


def _names(row: Row) -> list[table.Cell]:
    integrity = {True: "on", False: "off", None: None}[row.integrity]
    return [row.model, row.operation, row.transport, integrity]


def _known_changes(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """None where one of both records is older than these facts."""
    if not before or not after:
        return []
    return _changes(kind, _texts(before), _texts(after))


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: ", ".join(fact.values()) if isinstance(fact, Mapping) else str(fact)
        for name, fact in facts.items()
    }


def _changes(kind: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [
        f"another {kind}: {name and f'{name} '}{before.get(name, 'absent')} and "
        f"{after.get(name, 'absent')}"
        for name in names
        if before.get(name) != after.get(name)
    ]
