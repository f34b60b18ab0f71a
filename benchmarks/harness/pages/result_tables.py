"""Markdown tables of committed records, as a `results.toml` describes them.

    [[test_swap]]                       a table of the block `<!-- results test_swap -->`
    records = ["test_swap.json"]        below benchmarks/results
    figures = '(?P<model>.+): (?P<batch>.+)'
    lines = { model = "model", "" = "batch" }
    columns = { "computing, s" = "{computing}", "swap out, s" = "{swap out}" }

Each row or figure of the records is a fact. A fact has fields (words that name it) and values
(numbers). `lines` and `across` choose the fields that name lines and columns; templates print the
values. A template with a name that a fact lacks prints `-`, so a record of an interrupted run, or
one with other models, gives a table with gaps or with more lines.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.harness.pages.result_facts import NOISY, Fact, Table, facts_of
from benchmarks.harness.record import Record
from benchmarks.harness.table import digits

Key = tuple[str, ...]

NOTHING = "-"
MARK = "*"
"""Behind the value of a row whose range is above `NOISY`."""
_LONGEST_LINE = 320
_MOST_NAMES = 3
_VALUE = re.compile(r"\{(?P<name>[^{}]*?)(?P<over> over base)?(?::(?P<places>\d))?\}")


@dataclass(frozen=True)
class _Selection:
    """The facts of one table, and its lines and columns in order."""

    table: Table
    facts: Sequence[Fact]
    index: Mapping[Key, Fact]
    """By the fields of lines, columns and pair. Facts that `where` leaves out are here too, because
    one of them may be the base of the others."""

    @classmethod
    def of(cls, table: Table, facts: Sequence[Fact]) -> "_Selection":
        chosen = [
            fact
            for fact in facts
            if all(fact.fields.get(n, "") in allowed for n, allowed in table.where.items())
        ]
        table = _told_apart(table, chosen)
        fields = _named_by(table)
        return cls(table, chosen, {_key(fact, fields): fact for fact in (*facts, *chosen)})

    def distinct(self, fields: Sequence[str]) -> list[Key]:
        """The keys of these fields: in the order of `where`, or else of the records."""
        ranks = {name: self._ranks(name) for name in fields}
        keys = {_key(fact, fields) for fact in self.facts}
        return sorted(keys, key=lambda key: [ranks[n][v] for n, v in zip(fields, key, strict=True)])

    def _ranks(self, name: str) -> Mapping[str, int]:
        found = dict.fromkeys(fact.fields.get(name, "") for fact in self.facts)
        order = self.table.where.get(name) or [*found]
        return {value: order.index(value) for value in found}

    def cell(self, line: Key, column: Key) -> str:
        """All facts of one place."""
        table = self.table
        template = table.cells.get(line[0], table.cell)
        if not table.pair:
            return self.show(self.index.get((*line, *column)), template)
        unpaired = self.index.get((*line, *column, ""))
        if unpaired is not None:
            return self.show(unpaired, template)
        pairs = [pair for pair in self.distinct([table.pair]) if pair != ("",)]
        shown = [self.show(self.index.get((*line, *column, *pair)), template) for pair in pairs]
        return " / ".join(shown) if any(text != NOTHING for text in shown) else NOTHING

    def show(self, fact: Fact | None, template: str) -> str:
        """A template filled in; the default is every value by its name, and the unit."""
        if fact is None:
            return NOTHING
        if fact.reason:
            word = fact.reason.partition(":")[0]
            return word if word in ("SKIPPED", "FAILED") else NOTHING
        if not template:
            values = ", ".join(f"{n} {digits(v)}".strip() for n, v in fact.values.items())
            return f"{values} {fact.unit}".strip() or NOTHING
        known = False

        def filled(match: re.Match[str]) -> str:
            nonlocal known
            value = self._value(fact, match["name"], over_base=bool(match["over"]))
            known |= value is not None
            if value is None:
                return NOTHING
            return f"{value:,.{match['places']}f}" if match["places"] else digits(value)

        text = _VALUE.sub(filled, template)
        if not known:
            return NOTHING
        return f"{text}{MARK}" if fact.spread > NOISY and not _shows_range(template) else text

    def _value(self, fact: Fact, name: str, *, over_base: bool) -> float | None:
        value = fact.values.get(name)
        if not over_base or value is None:
            return value
        there = {**fact.fields, **self.table.base}
        base = self.index.get(tuple(there.get(n, "") for n in _named_by(self.table)))
        divisor = base.values.get(name) if base is not None else None
        return value / divisor if divisor else None

    def reasons(self) -> Iterator[str]:
        """Each reason of a SKIPPED or FAILED fact once, with the facts that it is of."""
        by_reason: dict[str, list[Fact]] = {}
        for fact in self.facts:
            if fact.reason.startswith(("SKIPPED: ", "FAILED: ")):
                by_reason.setdefault(fact.reason, []).append(fact)
        for reason, facts in by_reason.items():
            word, _, why = reason.partition(": ")
            yield f"{word}: {self._places(facts)}: `{_one_line(why)}`"

    def _places(self, facts: Sequence[Fact]) -> str:
        """The values of the fields that distinguish these facts from the others."""
        parts = []
        for name in _named_by(self.table):
            here = dict.fromkeys(fact.fields.get(name, "") for fact in facts)
            total = len(self._ranks(name))
            if _MOST_NAMES < len(here) < total:
                parts.append(f"{len(here)} of {total}")
            elif len(here) < total:
                parts.append(" and ".join(_shown(self.table, value) for value in here if value))
        return ", ".join(filter(None, parts)) or "all"


def render(
    table: Table, records: Mapping[str, Record], links: Mapping[str, str], *, about: bool = True
) -> list[str]:
    """The lines of one table, without blank lines around it. `records` and `links` are by file
    name. `about` puts the command, date and machine of each record above it.

    Raises `ValueError` where a record has the same fact twice.
    """
    facts = [
        fact
        for name in table.records
        for fact in facts_of(records[name], name.removesuffix(".json"), table)
    ]
    lines: list[str] = []
    if about:
        for name in table.records:
            trials = [fact.num_trials for fact in facts if _is_of(fact, name) and fact.num_trials]
            lines += [*_about(records[name], links[name], trials, table), ""]
    if table.title:
        lines += [f"{table.title}:", ""]
    selection = _Selection.of(table, facts)
    if not selection.facts:
        return [*lines, NO_FACTS]
    grid = _grid(selection)
    lines += markdown(*grid)
    if any(MARK in cell for line in grid[1] for cell in line):
        noisy = [fact.spread for fact in selection.facts if fact.spread > NOISY]
        lines += ["", f"`{MARK}` {_noise(noisy)}"]
    if reasons := list(selection.reasons()):
        lines += ["", *(f"- {reason}" for reason in reasons)]
    return lines


def _noise(spreads: Sequence[float]) -> str:
    return (
        f"noisy: from the fastest to the slowest trial more than {NOISY:.0%} of the median "
        f"(up to {max(spreads):.0%})."
    )


def _shows_range(template: str) -> bool:
    return "{min" in template and "{max" in template


NO_FACTS = "*The record has nothing that this table shows.*"


def _named_by(table: Table) -> list[str]:
    return [*table.lines.values(), *table.across, *([table.pair] if table.pair else [])]


def _told_apart(table: Table, facts: Sequence[Fact]) -> Table:
    """The table, with more fields that name its lines where two facts would share a place: a record
    may have more models or transports than the one that the table was written for."""
    for name in ("", "model", "transport", "integrity", "record", "operation", "name"):
        differ = len({fact.fields.get(name, "") for fact in facts}) > 1
        if differ and name not in _named_by(table):
            table = msgspec.structs.replace(table, lines={**table.lines, name: name})
        if len({_key(fact, _named_by(table)) for fact in facts}) == len(facts):
            return table
    twice = next(f for f in facts for g in facts if f is not g and f.fields == g.fields)
    raise ValueError(f"the record has this twice: {dict(twice.fields)}")


def _is_of(fact: Fact, name: str) -> bool:
    return fact.fields["record"] == name.removesuffix(".json")


def _key(fact: Fact, fields: Sequence[str]) -> Key:
    return tuple(fact.fields.get(name, "") for name in fields)


def _grid(selection: _Selection) -> tuple[list[str], list[list[str]]]:
    """Heads, and the cells of each line."""
    table = selection.table
    line_fields = [*table.lines.values()]
    keys = selection.distinct(line_fields)
    heads, body = [*table.lines], [[_shown(table, part) for part in key] for key in keys]
    if table.columns:
        heads += [*table.columns]
        for cells, key in zip(body, keys, strict=True):
            fact = selection.index.get(key)
            cells += [selection.show(fact, template) for template in table.columns.values()]
        return heads, body
    columns = selection.distinct(table.across)
    heads += [", ".join(_shown(table, part) for part in key if part) for key in columns]
    for cells, key in zip(body, keys, strict=True):
        cells += [selection.cell(key, column) for column in columns]
    return heads, body


def _shown(table: Table, value: str) -> str:
    return table.names.get(value, value)


def _about(record: Record, link: str, trials: Sequence[int], table: Table) -> Iterator[str]:
    parts = [f"[{link.rpartition('/')[2]}]({link})", record.started[:10], record.describe_machine()]
    parts += filter(None, [record.host.get("cpu"), record.describe_source()])
    if trials:
        low, high = min(trials), max(trials)
        count = f"{high}" if low == high else f"{low} to {high}"
        parts.append("one trial" if high == 1 else f"medians of {count} trials")
    if record.stolen_percent and record.stolen_percent >= 1:
        parts.append(f"{record.stolen_percent:g} % of the CPU time stolen by the host")
    if not record.names_channels and any(row.transport == "tcp" for row in record.rows):
        parts.append("older than the names of channels: its `tcp` may be ZeroMQ's")
    if record.interrupted:
        parts.append("**interrupted: not everything was measured**")
    yield f"{', '.join(parts)}: `{_one_line(record.command)}`"
    found = {name: record.parameters.get(name) for name in table.parameters}
    notes = [f"{name}: {_quoted(value)}" for name, value in found.items() if value is not None]
    notes += [
        f"{name} {version}" for name in table.versions if (version := record.versions.get(name))
    ]
    if notes:
        yield f"<br>{'; '.join(notes)}"


def _quoted(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f'"{_one_line(str(value))}"'


def _one_line(text: str) -> str:
    """For a span of code: no newline, no backtick, not endless."""
    text = " ".join(text.replace("`", "'").replace('"', "'").split())
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…"


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, without columns that are empty."""
    used = [n for n in range(len(heads)) if any(line[n] not in ("", NOTHING) for line in body)]
    for line in (heads, ["---"] * len(heads), *body):
        cells = [line[n].replace("|", r"\|").replace("\n", " ") for n in used]
        yield f"| {' | '.join(cells)} |" if line[0] != "---" else f"|{'|'.join(cells)}|"
