"""The frame of a check's own command: its flags, its record, which is written as it grows.

A package that kvferry needs and this Python lacks must end no check of torch alone, so nothing here
imports more than the standard library, numpy and, late, torch.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.gpu_check import device as devices
from benchmarks.gpu_check.device import Device
from benchmarks.harness import machine, table
from benchmarks.harness.files import why_not_written
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner, Sample, Skipped

Measure = Callable[[Device, Record, Runner, argparse.Namespace], None]
MeasurePlain = Callable[[Record, Runner, argparse.Namespace], None]


def parser(module: str, question: str | None) -> argparse.ArgumentParser:
    """The flags of a check of a device."""
    made = plain_parser(module, question)
    made.add_argument(
        "--device", choices=devices.DEVICES, default=devices.GPU,
        help="cpu: the same copies inside the host's memory (default: %(default)s)",
    )  # fmt: skip
    return made


def plain_parser(module: str, question: str | None) -> argparse.ArgumentParser:
    """The flags of every check."""
    made = argparse.ArgumentParser(
        prog=f"python -m {module}", description=question,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--json", type=result, metavar="FILE", help="write the record to this file")
    made.add_argument(
        "--trials", type=positive, default=5, metavar="N",
        help="timed rounds of each copy (default: %(default)s)",
    )  # fmt: skip
    return made


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def run(module: str, argv: Sequence[str], arguments: argparse.Namespace, measure: Measure) -> int:
    """Find the device, measure, write and print. Returns the exit status."""

    def measure_device(record: Record, runner: Runner, arguments: argparse.Namespace) -> None:
        try:
            device = devices.find(arguments.device)
        except Skipped as reason:
            record.rows.append(Row("device", "find it", 0, Sample(skipped=str(reason))))
        else:
            record.versions |= device.versions()
            measure(device, record, runner, arguments)

    return run_plain(module, argv, arguments, measure_device)


def run_plain(
    module: str, argv: Sequence[str], arguments: argparse.Namespace, measure: MeasurePlain
) -> int:
    """Measure, write and print. Returns the exit status."""
    record = Record.begin(module, argv)
    record.machine = machine.describe_with_gpu()
    with Runner(1, 0) as runner:
        measure(record, runner, arguments)
    record.interrupted = runner.interrupted
    record.end()
    write(record, arguments)
    lines = [[row.model, row.operation, row.transport or "", row.seconds, row.gb_per_s, row.reason]
             for row in record.rows]  # fmt: skip
    print(table.render(["", "step", "", "s", "GB/s", ""], lines))
    if runner.interrupted:
        return 130
    return 1 if runner.num_failed else 0


def write(record: Record, arguments: argparse.Namespace) -> None:
    """Write the record as it is now: a check that is killed keeps it."""
    if arguments.json is not None:
        try:
            record.write(arguments.json)
        except OSError as error:
            print(f"not written: {error}", file=sys.stderr)


def result(text: str) -> Path:
    if why := why_not_written(Path(text)):
        raise argparse.ArgumentTypeError(why)
    return Path(text)
