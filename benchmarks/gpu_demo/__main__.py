"""vLLM on a GPU: do all levels work here, with equal answers, and what do they cost and gain?

    make gpu-demo
    python -m benchmarks.gpu_demo --model /models/Qwen2.5-3B-Instruct
    python -m benchmarks.gpu_demo --only demo,exactness --page demo.html
    python -m benchmarks.gpu_demo --on-cpu                      the same path with small numbers

The demo, exactness, tensor parallelism, test_transfer_out and test_transfer_in, one after another.
The result is one page that loads nothing and can be sent. Ctrl-C leaves a page of what has ended.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_check.judging import FAILED, row_of
from benchmarks.gpu_demo import plan, report
from benchmarks.gpu_demo.plan import Step, Where
from benchmarks.gpu_demo.report import Result
from benchmarks.harness import machine, options
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.commands.steps import Ended, run
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner

MODULE = "benchmarks.gpu_demo"

MODEL = "steps"
"""`model` of the record's rows."""

FOLDER = REPOSITORY / ".cache" / "gpu_demo"

Run = Callable[[Sequence[str], Path, float], Ended]


def main(argv: Sequence[str] | None = None) -> int:
    """0 when no step FAILED; 1 when one did; 2 for wrong options; 130 after Ctrl-C."""
    parser = _parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    where = plan.look(on_cpu=arguments.on_cpu, model=arguments.model)
    steps = plan.steps(where)
    try:
        chosen = plan.named(arguments.only, steps) if arguments.only is not None else steps
    except ValueError as error:
        parser.error(f"--only: {error}")
    if all(step.why_not for step in chosen):
        with tolerate_closed_pipe():
            print(report.as_table([report.skipped(step) for step in chosen]))
            print("nothing can run here; --on-cpu runs the same path with small numbers")
        return 0
    record = begin(argv, where)
    demonstration = Demonstration(
        chosen, where, record, arguments.folder, arguments.page, arguments.json
    )
    with Runner(1, 0) as interrupts:  # SIGTERM as Ctrl-C
        demonstration.run_all()
    with tolerate_closed_pipe():
        print(report.as_table(demonstration.results))
        print(f"{len(demonstration.results)} of {len(chosen)} steps have ended; "
              f"the page, which can be sent: {arguments.page}")  # fmt: skip
    if interrupts.interrupted:
        return 130
    return 1 if any(one.verdict.state == FAILED for one in demonstration.results) else 0


def begin(argv: Sequence[str], where: Where) -> Record:
    """The record of all steps, without the names of this user's folders."""
    record = Record.begin(MODULE, argv)
    record.command = report.without_folders(record.command)
    record.machine = machine.describe_with_gpu()
    if (cuda := machine.cuda_version()) is not None:
        record.versions["CUDA of the driver"] = cuda
    record.parameters["GPUs"] = f"{where.num_gpus} GPU{'s' * (where.num_gpus != 1)}"
    return record


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass
class Demonstration:
    """The steps one after another, and the page and the record after each."""

    steps: Sequence[Step]
    where: Where
    record: Record
    folder: Path
    page: Path
    json: Path | None = None
    run: Run = run
    show: Callable[[str], None] = _show
    results: list[Result] = field(default_factory=list)

    def run_all(self) -> None:
        """Every step. A KeyboardInterrupt ends the one that runs and is raised again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, step in enumerate(self.steps):
            where = f"{number + 1}/{len(self.steps)} {step.name}"
            result = report.skipped(step)
            if not step.why_not:
                self.show(f"{where}: {step.question} (its log: {self._log(step)})")
                result = self._run(step)
            self.show(f"{where}: {' '.join(filter(None, result.verdict))}")
            self.results.append(result)
            self.record.rows.append(row_of(MODEL, step.name, result.verdict, result.seconds))
            self._write()

    def _write(self) -> None:
        text = report.render(self.results, self.record, self.folder, num_steps=len(self.steps))
        self.page.write_text(text, encoding="utf-8")
        self.record.end()
        if self.json is not None:
            self.record.write(self.json)

    def _run(self, step: Step) -> Result:
        for old in self.folder.glob(f"{step.file_name}*"):
            old.unlink()
        command = step.command(self.folder, plot=self.where.can_plot)
        ended = self.run(command, self._log(step), step.limit_s)
        return report.result_of(step, ended, self._log(step), self.folder)

    def _log(self, step: Step) -> Path:
        return self.folder / f"{step.file_name}.log"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", metavar="NAMES", help="parts of names, with commas between them: demo, "
        "exactness, tensor parallelism, transfer out, transfer in (default: all)")  # fmt: skip
    add("--model", default="", metavar="DIR",
        help="the weights of Qwen2.5-3B-Instruct, for the transfers with the source's numbers "
        "(default: where vLLM finds them without a download)")  # fmt: skip
    add("--on-cpu", action="store_true", help="small numbers, for vLLM's CPU platform")
    add("--page", type=options.result, default=Path("gpu_demo.html"), metavar="FILE",
        help="the page (default: %(default)s)")  # fmt: skip
    add("--json", type=options.result, metavar="FILE", help="write the verdicts as a record")
    add("--folder", type=Path, default=FOLDER, metavar="DIR",
        help="logs and records (default: .cache/gpu_demo)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
