"""The first minute: how long from a clone to the first hit, and what does a help page cost?

    python -m benchmarks.first_minute
    python -m benchmarks.first_minute --only help

The two commands that README names first run in a fresh clone of the last commit, in a folder that
has nothing else. `make setup` downloads what pip's and uv's caches lack, so its time is that of the
network and of the disk. A help page's time is the CPU time of its process, from its start on.
"""

import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.record import Figure, Record
from benchmarks.harness.runner import Runner
from remote_server.cli.commands import COMMANDS

MODULE = "benchmarks.first_minute"

CLONE, HELP = "clone", "help"
TARGETS = {"setup": "`make setup` in a fresh clone", "demo": "then `make demo`, to its end"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    made = options.parser(MODULE, "the time to the first hit, and of help pages")
    made.add_argument(
        "--only", choices=(CLONE, HELP), help="the clone, or the help pages (default: both)"
    )
    arguments = made.parse_args(argv)
    record = Record.begin(MODULE, argv)
    with Runner(arguments.trials, arguments.warm_ups) as runner:
        if arguments.only != CLONE:
            _until_interrupted(runner, lambda: measure_help(record, runner))
        if arguments.only != HELP and not runner.interrupted:
            _until_interrupted(runner, lambda: measure_clone(record, runner))
    options.write(record, runner, arguments, chart)
    lines: list[list[table.Cell]] = [
        [one.name, f"{one.values['median']:.3f}", f"{one.values['most']:.3f}", one.unit]
        for one in record.figures
    ]
    print(table.render(["", "median", "most", ""], lines))
    return options.finish(record, runner)


def _until_interrupted(runner: Runner, measure: Callable[[], None]) -> None:
    try:
        measure()
    except KeyboardInterrupt:
        runner.interrupted = True
    finally:
        runner.show("")


def measure_help(record: Record, runner: Runner) -> None:
    """CPU seconds of `kvferry --help`, and of the help of each command."""
    for name in ("", *COMMANDS):
        title = f"kvferry {name} --help".replace("  ", " ")
        runner.show(title)
        command = [sys.executable, "-m", "remote_server.cli", *([name] if name else []), "--help"]
        rounds = [_cpu_of(command) for _ in range(runner.warm_ups + runner.trials)]
        record.figures.append(_figure(title, "s of CPU", rounds[runner.warm_ups :]))


def _cpu_of(command: Sequence[str]) -> float:
    """CPU seconds of a process, user's and system's. Raises `CalledProcessError`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_clone(record: Record, runner: Runner) -> None:
    """Seconds of each target in a clone, once: the second time would find everything done."""
    folder = Path(tempfile.mkdtemp(prefix="first-minute-"))
    try:
        clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
        for target, title in TARGETS.items():
            runner.show(title)
            began = time.monotonic()
            ran = subprocess.run(["make", target], cwd=clone, capture_output=True, text=True)
            if ran.returncode:
                runner.num_failed += 1
                print(f"make {target}: exit status {ran.returncode}\n{ran.stderr[-2000:]}",
                      file=sys.stderr)  # fmt: skip
                return
            record.figures.append(_figure(title, "s", [time.monotonic() - began]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figure(name: str, unit: str, values: Sequence[float]) -> Figure:
    return Figure(name, unit, {"median": median(values), "most": max(values)},
                  rounds={"median": values})  # fmt: skip


def chart(record: Record) -> plot.Chart:
    """A bar for each help page."""
    pages = [one for one in record.figures if one.name.endswith("--help")]
    title = titles.of(record, "CPU time of a help page")
    names = [one.name.removesuffix(" --help") for one in pages]
    return plot.bars(title, "ms", names, {"median": [1000 * one.values["median"] for one in pages]})


if __name__ == "__main__":
    sys.exit(main())
