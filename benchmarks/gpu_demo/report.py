"""Verdicts of the steps, and the page: one file that loads nothing, to be sent to others."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check.judging import FAILED, OK, SKIPPED, Verdict, every_row, read
from benchmarks.gpu_demo.plan import Step
from benchmarks.harness import table
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.commands.steps import Ended, last_lines
from benchmarks.harness.pages import html, page
from benchmarks.harness.record import Record

CANNOT_RUN = 2
"""A benchmark's exit status where this machine cannot measure these numbers."""

_LINES = 60
"""Of the log of a failure, and of the output of a step without a record."""


_MARKS = ("WRONG ", "FAILED ", "ERROR ")
"""Beginnings of the lines by which the demo and pytest report what is wrong."""


class Result(NamedTuple):
    step: Step
    verdict: Verdict
    seconds: float = 0.0
    lines: Sequence[str] = ()
    """The end of the log."""


def skipped(step: Step) -> Result:
    return Result(step, Verdict(SKIPPED, step.why_not))


def result_of(step: Step, ended: Ended, log: Path, folder: Path) -> Result:
    """The verdict of a step that has ended."""
    lines = [without_folders(line) for line in last_lines(log, _LINES)]
    return Result(step, _verdict(step, ended, lines, folder), ended.seconds, lines)


def _verdict(step: Step, ended: Ended, lines: Sequence[str], folder: Path) -> Verdict:
    wrong = [line for line in lines if line.startswith(_MARKS)]
    last = [*lines, *wrong[:1]][-1][:300] if lines else "no output"
    if ended.is_cut:
        return Verdict(FAILED, f"did not end within {ended.seconds:.0f} s")
    if ended.status < 0:
        return Verdict(FAILED, f"ended by signal {-ended.status}: {last}")
    if step.has_record and ended.status == CANNOT_RUN:
        return Verdict(SKIPPED, last)
    found = read(step.record(folder)) if step.has_record else None
    if found is not None and (judged := every_row()(*found)).state != OK:
        return judged
    if ended.status:
        return Verdict(FAILED, f"exit status {ended.status}: {last}")
    if step.has_record and found is None:
        return Verdict(FAILED, "no record")
    return Verdict(OK)


def without_folders(text: str) -> str:
    """`text` without the names of this user's folders, since the page is sent to others."""
    return text.replace(str(REPOSITORY), ".").replace(str(Path.home()), "~")


def as_table(results: Sequence[Result]) -> str:
    """The verdicts as text."""
    lines: list[list[table.Cell]] = [
        [one.step.name, one.verdict.state, round(one.seconds), one.verdict.reason]
        for one in results
    ]
    return table.render(["step", "", "s", ""], lines)


def render(results: Sequence[Result], record: Record, folder: Path, *, num_steps: int) -> str:
    """The page of the steps that have ended, `num_steps` with those that have not. `record` is
    that of all steps."""
    facts = [record.started, record.describe_machine(), *map(str, record.parameters.values())]
    about = "; ".join(facts)
    known = "; ".join(f"{name} {version}" for name, version in record.versions.items())
    parts = [
        "<h1>kvferry on this machine</h1>",
        f'<p class="about">{escape(about)}</p><p class="about">{escape(known)}</p>',
    ]
    if len(results) < num_steps:
        parts.append(f"<p>Interrupted: {len(results)} of {num_steps} steps have ended.</p>")
    parts += ['<div class="wide"><table>',
              "<tr><th>step</th><th>verdict</th><th class=n>s</th><th></th></tr>",
              *map(_line, results), "</table></div>"]  # fmt: skip
    for one in results:
        parts += _section(one, folder)
    return html.whole("kvferry on this machine", page.STYLE, parts)


def _line(one: Result) -> str:
    cells = [escape(f"{one.step.name}"), f"<b>{one.verdict.state}</b>"]
    return (
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}<td class=n>{one.seconds:.0f}</td>"
        f'<td class="why long">{escape(one.verdict.reason)}</td></tr>'
    )


def _section(one: Result, folder: Path) -> Iterable[str]:
    if one.verdict.state == SKIPPED and not one.lines:
        return
    yield f"<section><h2>{escape(one.step.question)}</h2>"
    if one.step.has_record:
        for shown in page.latest(folder)[0]:
            if shown.record.benchmark == one.step.words[0]:
                shown.record.command = without_folders(shown.record.command)
                yield from page.record_parts(shown)
    text = escape("\n".join(one.lines))
    opened = " open" if one.verdict.state == FAILED or not one.step.has_record else ""
    yield f"<details{opened}><summary>The end of its output</summary>"
    yield f'<pre tabindex="0">{text}</pre></details>'
    yield "</section>"
