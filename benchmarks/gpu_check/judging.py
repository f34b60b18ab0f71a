"""Verdicts of checks: from the record that a check has written, its log, and how it ended."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.commands.steps import Ended, last_lines
from benchmarks.harness.record import Figure, Record, RecordError, Row
from benchmarks.harness.runner import Sample

OK, FAILED, SKIPPED = "OK", "FAILED", "SKIPPED"

INTERRUPTED = 130

DISTRIBUTIONS = {"zmq": "pyzmq"}
"""What to install for a module of another name."""

_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


class Verdict(NamedTuple):
    state: str
    reason: str = ""


@dataclass
class Kept:
    """What the record of all checks takes over from one."""

    rows: Sequence[Row] = ()
    figures: Sequence[Figure] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


Judge = Callable[[Mapping[str, Any], Record], Verdict]
"""Of the whole document and of the record in it."""


def install_name(module: str) -> str:
    """The package that has this module."""
    top = module.partition(".")[0]
    return DISTRIBUTIONS.get(top, top)


def read(path: Path) -> tuple[Mapping[str, Any], Record] | None:
    """The document of a check and its record; None where it has written none."""
    try:
        return json.loads(path.read_text()), Record.read(path)
    except (OSError, ValueError, RecordError):
        return None


def verdict_of(
    ended: Ended, log: Path, found: tuple[Mapping[str, Any], Record] | None, judge: Judge,
    limit_is_budget: bool,
) -> Verdict:  # fmt: skip
    """`limit_is_budget`: the limit that ended it, if one did, is the rest of the time for all."""
    if ended.is_cut:
        kept = f"; {_num_measured(found)} rows until then are kept"
        if limit_is_budget:
            return Verdict(SKIPPED, f"no time left after {ended.seconds:.0f} s{kept}")
        judged = judge(*found) if found is not None and ended.status >= 0 else None
        if judged is not None and judged.state == OK:
            # It answered the signal: it is slow and does not hang.
            return Verdict(OK, f"cut after {ended.seconds:.0f} s{kept}")
        return Verdict(FAILED, f"did not end within {ended.seconds:.0f} s{kept}")
    if ended.status < 0:
        return Verdict(FAILED, f"ended by signal {-ended.status}{_last(log)}")
    if found is None:
        if missing := _NO_MODULE.match("\n".join(last_lines(log))):
            return Verdict(SKIPPED, f"needs {install_name(missing[1])}, which is not installed")
        return Verdict(FAILED, f"exit status {ended.status}, no record{_last(log)}")
    verdict = judge(*found)
    if verdict.state == OK and ended.status not in (0, 1):
        return Verdict(FAILED, f"exit status {ended.status}{_last(log)}")
    return verdict


def every_row(wanted: str = ".*", transport: str | None = None) -> Judge:
    """Judge the rows whose operation matches, of this transport if it is given: SKIPPED where none
    of them was measured, with their reasons. FAILED with any row that failed."""

    def judge(_: Mapping[str, Any], record: Record) -> Verdict:
        rows = [
            row for row in record.rows
            if re.fullmatch(wanted, row.operation) and transport in (None, row.transport)
        ]  # fmt: skip
        failed = [row for row in record.rows if row.sample.failed is not None]
        if failed:
            more = f" and {len(failed) - 1} more" * (len(failed) > 1)
            return Verdict(FAILED, f"{failed[0].operation}{more}: {failed[0].sample.failed}")
        if any(row.sample.measured for row in rows):
            return Verdict(OK)
        # A benchmark that cannot begin has one row, of another name.
        reasons = dict.fromkeys(row.sample.skipped for row in rows or record.rows
                                if row.sample.skipped)  # fmt: skip
        return Verdict(SKIPPED, "; ".join(map(str, reasons)) or "nothing was measured")

    return judge


def figures_without_errors(_: Mapping[str, Any], record: Record) -> Verdict:
    """Judge a sweep: each of its points counts its errors."""
    wrong = [figure for figure in record.figures if figure.values.get("errors")]
    if wrong:
        return Verdict(FAILED, f"{wrong[0].name}: {wrong[0].values['errors']:.0f} errors")
    return Verdict(OK) if record.figures else Verdict(FAILED, "no point was measured")


def storage_with_gpu(document: Mapping[str, Any], _: Record) -> Verdict:
    """Judge the storage workload by its tier on the GPU and its accounts, not by its latencies."""
    if why := document.get("failure"):
        return Verdict(FAILED, str(why))
    if "gpu" not in document.get("tiers", ()):
        return Verdict(SKIPPED, "; ".join(document.get("notes", ())) or "there is no GPU tier")
    counters = document.get("counters", {})
    if counters.get("gpu_damaged"):
        return Verdict(FAILED, f"{counters['gpu_damaged']} blocks of the GPU were damaged")
    wrong = [line["what"] for line in document.get("accounting", ()) if not line["agrees"]]
    if wrong:
        return Verdict(FAILED, f"the accounts disagree: {'; '.join(wrong)}")
    if not counters.get("gpu_hits"):
        return Verdict(FAILED, "no block was read from the GPU")
    return Verdict(OK)


def row_of(model: str, name: str, verdict: Verdict, seconds: float) -> Row:
    """A check or a step as a row of a record."""
    sample = Sample([seconds])
    if verdict.state != OK:
        sample = Sample(
            skipped=verdict.reason if verdict.state == SKIPPED else None,
            failed=verdict.reason if verdict.state == FAILED else None,
        )
    return Row(model, name, 0, sample)


def kept_of(record: Record, rows: str, figures: str, name: str) -> Kept:
    """The rows and figures whose names match; figures and parameters under the check's name: two
    checks run the same benchmark."""
    return Kept(
        [row for row in record.rows if re.fullmatch(rows, row.operation)],
        [
            replace(figure, name=f"{name}: {figure.name}")
            for figure in record.figures
            if re.fullmatch(figures, figure.name)
        ],
        {f"{name}: {key}": value for key, value in record.parameters.items()},
        record.versions,
    )


def _num_measured(found: tuple[Mapping[str, Any], Record] | None) -> int:
    return sum(row.sample.measured for row in found[1].rows) if found else 0


def _last(log: Path) -> str:
    """The log's last line without this machine's folders."""
    lines = last_lines(log)
    return f": {re.sub(r'(/[^/ ]+)+/', '', lines[-1])[:200]}" if lines else ""
