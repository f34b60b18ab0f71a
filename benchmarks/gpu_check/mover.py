"""The mover: how fast do its threads copy rows on this host, with checksums and without?

python -m benchmarks.gpu_check.mover --json mover.json
"""

import argparse
import selectors
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks.gpu_check import child
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, WrongBytes
from remote_server.native.base import Mover
from remote_server.native.job import Job, Kind
from remote_server.native.library import Library
from remote_server.native.mover import library_or_reason, make_mover, what_moves

MODULE = "benchmarks.gpu_check.mover"

MOST_THREADS = 8
ROW_BYTES = 2 << 20
_ROWS_PER_JOB = 8
_PATIENCE_S = 60.0
_POISON = 0xA5


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print. Exit status 1 when a row failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = child.plain_parser(MODULE, __doc__)
    parser.add_argument(
        "--total-mib", type=child.positive, default=512, metavar="N",
        help="bytes of each trial (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=child.positive, default=MOST_THREADS, metavar="N",
        help="measure 1 to N threads (default: %(default)s)",
    )  # fmt: skip
    return child.run_plain(MODULE, argv, parser.parse_args(argv), measure)


def measure(record: Record, runner: Runner, arguments: argparse.Namespace) -> None:
    """One copy of all rows by every number of threads, in turns."""
    record.parameters["mover"] = what_moves()
    runner.trials, runner.warm_ups = arguments.trials, 1
    num_rows = max(1, (arguments.total_mib << 20) // ROW_BYTES)
    title = f"{num_rows} rows of {ROW_BYTES >> 20} MiB"
    source = _rows(num_rows)
    source[:] = np.arange(num_rows, dtype=np.uint8)[:, None] + 1
    target = _rows(num_rows)
    with ExitStack() as stack:
        cases = []
        for threads in range(1, arguments.threads + 1):
            mover = make_mover(threads)
            stack.callback(mover.close)
            for hashed in (False, True):
                cases.append(_case(mover, threads, source, target, hashed=hashed))
        samples = runner.measure(title, cases)
    for key, sample in samples.items():
        record.rows.append(Row(title, str(key), source.nbytes, sample))


def _rows(number: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    rows = np.empty((number, ROW_BYTES), np.uint8)
    rows.fill(_POISON)
    return rows


def _case(
    mover: Mover, threads: int,
    source: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]",
    target: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", *, hashed: bool,
) -> Case:  # fmt: skip
    name = f"copy{' and hash' if hashed else ''}, {threads} thread{'s' * (threads > 1)}"
    if threads > 1 and not isinstance(library_or_reason(), Library):
        return Case.skipped(name, f"no threads move bytes without the library: {what_moves()}")

    def copy() -> None:
        jobs = [
            _job(source, target, first, hashed=hashed)
            for first in range(0, len(source), _ROWS_PER_JOB)
        ]
        for job in jobs:
            mover.submit(job)
        wait_for(mover, len(jobs))

    def check() -> None:
        if not np.array_equal(source, target):
            raise WrongBytes("the rows differ")

    return Case(name, copy, partial(target.fill, _POISON), check)


def _job(
    source: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]",
    target: "np.ndarray[tuple[int, int], np.dtype[np.uint8]]", first: int, *, hashed: bool,
) -> Job:  # fmt: skip
    places = range(first, min(first + _ROWS_PER_JOB, len(source)))
    number = len(places)
    return Job(
        Kind.COPY,
        [int(target.ctypes.data) + place * ROW_BYTES for place in places],
        [int(source.ctypes.data) + place * ROW_BYTES for place in places],
        [ROW_BYTES] * number, seeds=[0] * number if hashed else None, stream=True,
    )  # fmt: skip


def wait_for(mover: Mover, number: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Reap this many jobs. Raises `TimeoutError`, and `OSError` for a copy that failed."""
    deadline = clock() + _PATIENCE_S
    with selectors.DefaultSelector() as selector:
        selector.register(mover.fileno(), selectors.EVENT_READ)
        while number:
            if clock() > deadline:
                raise TimeoutError(f"{number} jobs of the mover have not ended")
            selector.select(1.0)
            for job in mover.reap():
                number -= 1
                if sum(job.done) != job.num_bytes:
                    raise OSError("a copy of the mover's failed")


if __name__ == "__main__":
    sys.exit(main())
