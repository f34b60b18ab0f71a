"""The command of the benchmark: `python -m benchmarks.storage_workload --scenario quick`."""

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.files import why_not_into
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.storage_workload.pages import document, pictures, report
from benchmarks.storage_workload.pages.pictures import charts_of_file as charts_of_file
from benchmarks.storage_workload.plan import flags
from benchmarks.storage_workload.plan.options import default_output
from benchmarks.storage_workload.runs import suite, trials
from benchmarks.storage_workload.runs.run import execute
from remote_server.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the run passed, 1 when it did not, 2 for impossible options, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with _sigterm_as_ctrl_c():
            if argv[:1] == ["suite"]:
                return suite.main(argv[1:])
            if argv[:1] == ["validate"]:
                return trials.main(argv[1:])
            if argv[:1] == ["report"]:
                return pictures.main(argv[1:])
            return _measure(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _measure(argv: Sequence[str]) -> int:
    options = flags.parse(argv)
    if options.output is None and (why := why_not_into(Path())):
        raise ConfigError(f"output: {why}")
    words = ["python", "-m", document.BENCHMARK, *options.arguments()]
    with tolerate_closed_pipe():
        print(f"as: {shlex.join(words)}")
    try:
        run = execute(options)
    except KeyboardInterrupt:
        print("interrupted before a clean end: no result is written", file=sys.stderr)
        return 130
    found = run.document()
    # Before any printing: a closed pipe must not lose the file.
    output, unwritten = _write(found, run)
    with tolerate_closed_pipe():
        print(report.render(found))
        print(f"\n{run.record.describe_machine()}; {run.record.command}; {output}")
        if run.record.stolen_percent:
            stolen = f"{run.record.stolen_percent:g} % of the CPU time"
            print(f"the host gave {stolen} to other machines")
    if run.failure is not None:
        print(f"{run.failure}; the results until then are in {output}", file=sys.stderr)
    if unwritten:
        print(f"not written: {unwritten}", file=sys.stderr)
    if run.interrupted:
        return 130
    return 0 if document.word_of(found) != "FAIL" and not unwritten else 1


def _write(found: Mapping[str, Any], run: document.Run) -> tuple[Path | None, str]:
    """Write the files of a run; returns the path of its JSON, and any error. When the disk is full
    the results are still printed."""
    output = run.options.output
    try:
        output = output or default_output()
        document.write(found, output)
        pictures.write(found, run.options.html, run.options.plots)
    except OSError as error:
        return output, str(error)
    return output, ""


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM into Ctrl-C, so that a disk tier always removes its directory."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
