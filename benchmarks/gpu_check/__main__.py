"""A GPU without vLLM: are pools page-locked there, how fast are copies, and does all else work?

    make gpu-check
    python -m benchmarks.gpu_check --only page-locking,copies
    python -m benchmarks.gpu_check --budget 300 --json gpu.json

Each check is OK, FAILED, or SKIPPED with the reason. Only a FAILED one makes the exit status 1.
torch is enough for the first two; the others need the packages of kvferry, and none needs vLLM.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_check import checks
from benchmarks.gpu_check.checks import CHECKS
from benchmarks.gpu_check.judging import OK
from benchmarks.gpu_check.session import Session, look
from benchmarks.harness import machine, table
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.files import why_not_into, why_not_written
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner

MODULE = "benchmarks.gpu_check"

RECORD = REPOSITORY / "benchmarks" / "results" / "gpu_check.json"
LOGS = REPOSITORY / ".cache" / "gpu_check"
BUDGET_S = 450


def main(argv: Sequence[str] | None = None) -> int:
    """0 when nothing FAILED; 1 when something did; 2 for wrong options; 130 after Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(argv)
    if why := _prepare(arguments.logs):
        print(f"gpu_check: {why}", file=sys.stderr)
        return 2
    record = Record.begin(MODULE, argv)
    record.machine = machine.describe_with_gpu()
    record.parameters["budget"] = f"{arguments.budget:g} s"
    here = look({module for check in arguments.only for module in check.modules})
    session = Session(
        record, here, arguments.budget, arguments.logs, lambda made: _write(made, arguments.json),
        show=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    with Runner(1, 0) as interrupts:  # SIGTERM as Ctrl-C
        session.check_all(arguments.only)
    record.interrupted = interrupts.interrupted
    record.end()
    _write(record, arguments.json)
    with tolerate_closed_pipe():
        print(describe(session, arguments.json))
    if interrupts.interrupted:
        return 130
    return 1 if session.num_failed else 0


def describe(session: Session, path: Path) -> str:
    """The rows of copies, the table of checks, and the next step."""
    record = session.record
    parts = []
    lines: list[list[table.Cell]]
    measured = [row for row in record.rows if row.gb_per_s is not None]
    if measured:
        lines = [[row.model, row.operation, row.transport or "", row.gb_per_s, row.ratio_to_wall]
                 for row in measured]  # fmt: skip
        parts.append(table.render(["", "", "", "GB/s", "times the wall"], lines))
    lines = [[done.name, done.verdict.state, round(done.seconds), done.verdict.reason]
              for done in session.done]  # fmt: skip
    parts.append(table.render(["check", "", "s", ""], lines))
    num_ok = sum(done.verdict.state == OK for done in session.done)
    parts.append(
        f"{record.describe_machine()}; {num_ok} of {len(session.done)} checks OK, "
        f"{session.num_failed} FAILED; the record: {path}"
    )
    if record.interrupted:
        parts.append("interrupted: the checks after the last one above did not run")
    return "\n\n".join(parts) + f"\n{session.next_step()}"


def _write(record: Record, path: Path) -> None:
    try:
        record.write(path)
    except OSError as error:
        print(f"not written: {error}", file=sys.stderr)


def _prepare(logs: Path) -> str:
    """Make the folder of the logs. Returns why there can be none."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{logs}: {error.strerror}"
    return why_not_into(logs)


def _checks(text: str) -> list[checks.Check]:
    try:
        return checks.named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _result(text: str) -> Path:
    if why := why_not_written(Path(text)):
        raise argparse.ArgumentTypeError(why)
    return Path(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", type=_checks, default=CHECKS, metavar="NAMES",
        help="parts of names, with commas between them (default: all): "
        + "; ".join(check.name for check in CHECKS))  # fmt: skip
    add("--budget", type=_seconds, default=BUDGET_S, metavar="SECONDS",
        help="for all checks together; those for which none is left are SKIPPED "
        "(default: %(default)g)")  # fmt: skip
    add("--json", type=_result, default=RECORD, metavar="FILE",
        help="the record (default: benchmarks/results/gpu_check.json)")  # fmt: skip
    add("--logs", type=Path, default=LOGS, metavar="DIR",
        help="the checks' logs (default: .cache/gpu_check)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
