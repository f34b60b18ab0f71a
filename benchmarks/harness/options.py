"""The flags that all benchmarks have, and the files and exit status at their end."""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import pictures
from benchmarks.harness.files import why_not_written
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Runner
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import read_list
from remote_server.values import float_or_nan, parse_bytes

T = TypeVar("T")


def parser(
    module: str, question: str, *, trials: int = 7, warm_ups: int = 1
) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` with the common flags; the caller adds its own."""
    made = bare_parser(module, question)
    made.add_argument(
        "--trials", type=positive, default=trials, help="timed rounds (default: %(default)s)"
    )
    made.add_argument(
        "--warm-ups", type=int, default=warm_ups, help="rounds before them (default: %(default)s)"
    )
    made.add_argument(
        "--memory", type=size, metavar="SIZE", help="use at most this much; cases that need more "
        "are skipped (default: the machine's free memory)",
    )  # fmt: skip
    made.add_argument("--json", type=result, metavar="FILE", help="write the record to this file")
    made.add_argument(
        "--plot", type=drawing, metavar="FILE", help="write a chart to this file, as SVG and as PNG"
    )
    return made


def bare_parser(module: str, description: str) -> argparse.ArgumentParser:
    """A parser for `python -m MODULE` without a flag. Flags are whole: labels of titles and the
    record's command are made from them."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, allow_abbrev=False
    )


def add_files(made: argparse.ArgumentParser, drawn: str = "a chart", csv: str = "") -> None:
    """The flags of the files of a `bare_parser`; with the text `csv` also that of a CSV file."""
    made.add_argument("--json", type=result, metavar="FILE", help="write the record to this file")
    if csv:
        made.add_argument("--csv", type=result, metavar="FILE", help=csv)
    made.add_argument("--plot", type=drawing, metavar="FILE", help=f"write {drawn} to this file")


def add_sizes(made: argparse.ArgumentParser, default: str) -> None:
    """`--sizes`, of blocks; `default` is written as on the command line."""
    made.add_argument(
        "--sizes", type=several(size), default=default, metavar="SIZES",
        help=f"sizes of blocks, as in 64KiB,4MiB (default: {default})",
    )  # fmt: skip


def add_directory(made: argparse.ArgumentParser) -> None:
    """The flag that chooses the disk to measure."""
    made.add_argument(
        "--directory", type=folder, default=".", metavar="DIR",
        help="a folder on the disk to measure; written files are removed (default: this one)",
    )  # fmt: skip


def add_resume(made: argparse.ArgumentParser) -> None:
    """The flag that goes on with a run after Ctrl-C or a crash, in a parser that has `--json`."""
    made.add_argument(
        "--resume", action="store_true", help="keep what an earlier run of this command and commit "
        "has measured, which is beside the file of --json until a run is complete",
    )  # fmt: skip


def check_resume(made: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exits with 2 for `--resume` without the file beside which the journal is."""
    if arguments.resume and arguments.json is None:
        made.error("--resume: only with --json, beside whose file the measurements are kept")


def several(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A reader of values with commas between them, each read by `kind`."""

    def read(text: str) -> list[T]:
        return [kind(part) for part in text.split(",")]

    return read


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """A reader of some of the `known` names, with commas between them."""

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
        return text

    return several(read)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0; `nan` is refused."""
    value = float_or_nan(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def size(text: str) -> int:
    """`4GiB` as bytes."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def folder(text: str) -> Path:
    """The value of a flag that names a folder. It is absolute: servers run in a folder of their
    own, where a relative one is another."""
    return Path(text).resolve()


def add_server(made: argparse.ArgumentParser) -> None:
    """The flag that measures servers which already run, also on other machines."""
    made.add_argument(
        "--server", type=server, action="append", default=[], metavar="ADDRESS",
        help="measure running servers and start none: tcp://HOST:PORT, with ?keys=FILE where it "
        "requires keys; two or more are a fleet: repeated, or a range, or file://, as in an "
        "engine's setting; the blocks are removed at the end",
    )  # fmt: skip


def server(text: str) -> str:
    """An address, a range or a file, as in an engine's setting."""
    try:
        read_list(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def result(text: str) -> Path:
    """A file that can be written at the end of a run."""
    if why := why_not_written(Path(text)):
        raise argparse.ArgumentTypeError(why)
    return Path(text)


def drawing(text: str) -> Path:
    """A file for a chart, as `result`; needs matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("charts need matplotlib, which is not installed")
    return result(text)


def write(
    record: Record, runner: Runner, arguments: argparse.Namespace,
    draw: Callable[[Record], pictures.Charts],
) -> None:  # fmt: skip
    """Write the files that the arguments name; of several charts the first is `--plot`, the others
    have their names behind it. This precedes printing, because a closed pipe must not lose them. A
    file that cannot be written (a full disk) is reported and counts as a failure;
    the table is still printed."""
    record.interrupted = runner.interrupted
    record.end()
    try:
        if arguments.json is not None:
            record.write(arguments.json)
        if arguments.plot is not None:
            for file, chart in pictures.named(draw(record), arguments.plot):
                chart.write(file)
    except OSError as error:
        print(f"not written: {error}", file=sys.stderr)
        runner.num_failed += 1


def finish(record: Record, runner: Runner) -> int:
    """Print where the run took place and how it ended. Returns the exit status.

    130 after Ctrl-C or SIGTERM, as shells do after Ctrl-C; 1 after a failure; else 0.
    """
    print(f"\n{record.describe_machine()}; {record.command}")
    if record.stolen_percent:
        print(f"the host gave {record.stolen_percent:g} % of the CPU time to other machines")
    if runner.interrupted:
        print("interrupted: only the trials before it are shown", file=sys.stderr)
        return 130
    return 1 if runner.num_failed else 0
