"""A full cache under load and faults, for minutes or for a number of operations.

    make soak MINUTES=30                      # does anything grow?
    make chaos-long OPERATIONS=1000000        # is any byte wrong, does anything hang or stay?
    make chaos-long ARGS="--lanes"            # the same over lanes alone, all of them faulted

Faults come and go as in the random run; `random_run.py` defines a faulted operation, and the checks
at rest after each round.

For a number of operations, eight clients in two processes, over tcp, lanes and shared memory, ask
for four times what the server's memory holds and for twice what its disk holds, so that both evict
all the time. The blocks are small, and the server is killed as well.

With `--lanes`, eight clients put and get tiny blocks over lanes. Cuts go through every byte of the
blocks' headers, bytes and checksums in turn; other blocks are damaged, lost, repeated or stalled,
and tokens are stolen, repeated, late and made up (`lane_storm.py`). Only faulted operations count.

For minutes, four clients in one process ask for three times what the server's memory holds. It is
not killed, so that its memory has one history, and growth is a failure.

One line every few seconds; at the end, or after Ctrl-C, the result so far, which `--json` writes.
Exit status: 0 all was right, 1 something was not, 130 it was right until Ctrl-C.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from actors import Habits
from chaos_client import Hung, WrongBytes
from chaos_server import open_files, resident_bytes
from crew import medians
from lane_wire import HEADER, TRAILER_BYTES
from oracle import LANE_NAMESPACES, SMALL_NAMESPACES, TINY
from owned_process import OwnedProcess
from random_run import Plan, Report, Run
from weather import LONG_LIVED, UNDYING

MiB = 1 << 20

MOST_GROWTH = 0.05
"""Of resident memory, between the median of the second quarter and that of the last."""

MOST_MORE_FILES = 0
"""Of the number that is open, by the same measure: connections come and go."""

SAMPLE_S = 1.0


class Sample(NamedTuple):
    server_bytes: int
    client_bytes: int
    server_files: int
    client_files: int
    client_objects: int
    """Blocks that Python has allocated in the clients' processes, garbage included."""

    client_heap: int
    """Bytes that malloc has handed out there: resident memory without what it keeps."""


class Watch:
    """Samples what the processes occupy, and prints a line every few seconds."""

    def __init__(self, every_s: float) -> None:
        self.samples: list[Sample] = []
        self._every_s = every_s
        self._next_sample = self._next_line = 0.0
        self._last = (0.0, 0)

    def head(self) -> None:
        print(
            "  seconds  operations  faulted   per s   faults  kills  checks  server MiB  files"
            "  clients MiB  files",
            flush=True,
        )

    def look(self, run: Run) -> None:
        now = run.seconds
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_S
        sample = _sample(run)
        if sample is None:  # the server is away
            return
        self.samples.append(sample)
        if now >= self._next_line:
            self._next_line = now + self._every_s
            self._print(run, sample, now)

    def _print(self, run: Run, sample: Sample, now: float) -> None:
        each = [crew.progress() for crew in run.crews]
        operations = sum(one.operations for one in each)
        faulted = sum(one.faulted for one in each)
        faults = sum(one.faults for one in each) + run.faults.total()
        rate = (operations - self._last[1]) / max(now - self._last[0], 1e-3)
        self._last = now, operations
        print(
            f"{now:9.0f} {operations:11} {faulted:8} {rate:7.0f} {faults:8} {run.num_kills:6}"
            f"{run.report.rounds:8}{sample.server_bytes / MiB:12.1f} {sample.server_files:6}"
            f"{sample.client_bytes / MiB:13.1f} {sample.client_files:6}",
            flush=True,
        )


def _sample(run: Run) -> Sample | None:
    pids = [crew.pid for crew in run.crews if isinstance(crew, OwnedProcess)]
    memory = [crew.memory() for crew in run.crews]
    try:
        server = run.server.pid
        return Sample(
            resident_bytes(server), sum(map(resident_bytes, pids)),
            open_files(server), sum(map(open_files, pids)),
            sum(one.objects for one in memory), sum(one.heap for one in memory),
        )  # fmt: skip
    except (OSError, AssertionError):
        return None


def print_growth(samples: list[Sample]) -> bool:
    """Print what became of memory and files; whether they are flat. A server that was killed has no
    history to judge."""
    if len(samples) < 4:
        print("too short to say what grew")
        return True
    columns = [medians(column) for column in zip(*samples, strict=True)]
    flat = True
    for who, (before, after) in zip(("server", "clients"), columns[:2], strict=True):
        growth = after / before - 1
        flat &= growth <= MOST_GROWTH
        print(
            f"{who}: resident {before / MiB:.1f} MiB in the second quarter, "
            f"{after / MiB:.1f} in the last: {growth:+.1%}"
        )
    for who, (before, after) in zip(("server", "clients"), columns[2:4], strict=True):
        flat &= after <= before + MOST_MORE_FILES
        print(f"{who}: {before:g} files open in the second quarter, {after:g} in the last")
    for what, unit, (before, after) in zip(
        ("objects", "MiB of heap in use"), (1, MiB), columns[4:], strict=True
    ):
        before, after = before / unit, after / unit
        print(f"clients: {before:.6g} {what} in the second quarter, {after:.6g} in the last")
    return flat


def record(report: Report, error: BaseException | None) -> dict[str, Any]:
    """The run as JSON has it. A run ends with the first thing that is wrong."""
    wrong, hung = isinstance(error, WrongBytes), isinstance(error, Hung)
    operations: Counter[str] = Counter()
    outcomes: dict[str, dict[str, int]] = {}
    for (op, word), number in sorted(report.totals.outcomes.items()):
        operations[op] += number
        outcomes.setdefault(op, {})[word] = number
    return {
        "schema": 1,
        "seed": report.seed,
        "interrupted": report.interrupted,
        "seconds": round(report.seconds, 1),
        "operations": report.tally.operations,
        "faulted": report.tally.faulted,
        "operations_by_kind": dict(operations),
        "outcomes": outcomes,
        "keys_of_gets": dict(sorted(report.totals.blocks.items())),
        "verifies_sent": report.totals.counters["verify_sent"],
        "faults": dict(sorted(report.tally.faults.items())),
        "units_tampered_with": report.tally.tampered,
        "cuts_of_tiny_blocks": cuts_of(report),
        "checks_at_rest": report.rounds,
        "latest_end_behind_its_deadline_s": round(max(0.0, report.totals.worst_overrun_s), 3),
        "clients": {name: count for name, count in report.totals.counters.items() if count},
        "servers": {name: count for name, count in sorted(report.server.items()) if count},
        "wrong_blocks": int(wrong),
        "hangs": int(hung),
        "left_over": int(error is not None and not wrong and not hung),
        "error": "" if error is None else str(error),
        "machine": _machine(),
    }


def cuts_of(report: Report) -> dict[str, list[int]]:
    """How often the frame of a tiny block was cut before each of its bytes, by direction."""
    size = HEADER.size + TINY.block_bytes + TRAILER_BYTES
    return {
        direction: [report.tally.cuts[direction, size, at] for at in range(size)]
        for direction in ("to_server", "to_client")
    }


def _machine() -> dict[str, int]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cores": os.cpu_count() or 0, "memory_gib": round(memory / (1 << 30))}


LANE_STORM = Plan(
    0,
    transports=("lanes",) * 4,
    habits=Habits(
        LANE_NAMESPACES,
        clears_percent=0.01,
        most_under_way=32,
        operations={"get": 50, "put": 25, "force": 25},
        deadlines_s=(0.05, 0.5, 2.0),
        detaches=False,
    ),
    memory="16MiB",
    server_faults=LONG_LIVED,
    storm=True,
)
"""Faults of lanes alone, and those of the server, until there are enough."""


def plan_of(flags: argparse.Namespace) -> Plan:
    common = Plan(flags.seed, round_s=flags.round_s, calm=flags.calm)
    if flags.lanes:
        number = flags.operations or inf
        limits = {"faulted": number, "seconds": inf if flags.operations else flags.minutes * 60}
        return replace(
            LANE_STORM, seed=flags.seed, round_s=flags.round_s, processes=2, **limits
        )  # fmt: skip
    if flags.operations is None:
        seconds, steady = flags.minutes * 60, Habits(detaches=False)
        return replace(common, seconds=seconds, processes=1, habits=steady, server_faults=UNDYING)
    return replace(
        common,
        operations=flags.operations,
        transports=("tcp", "shm", "lanes", "auto"),
        processes=2,
        habits=Habits(SMALL_NAMESPACES, clears_percent=0.01, most_under_way=12),
        memory="16MiB",
        disk_bytes="32MiB",
        server_faults=LONG_LIVED,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--minutes", type=float, default=10.0)
    limit.add_argument("--operations", type=int, help="instead, and the server is killed as well")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--every-s", type=float, default=10.0, help="between two lines")
    parser.add_argument("--round-s", type=float, default=60.0, help="between two checks at rest")
    parser.add_argument("--lanes", action="store_true", help="faults of lanes; counts faulted ones")
    parser.add_argument("--calm", action="store_true", help="without faults")
    parser.add_argument("--json", type=Path, help="write the record of the run")
    flags = parser.parse_args()
    logging.getLogger("remote_server").setLevel(logging.ERROR)  # outages are what it is about
    watch, error, flat = Watch(flags.every_s), None, True
    began = time.monotonic()
    run = Run(plan_of(flags))

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run.stop()

    signal.signal(signal.SIGINT, on_interrupt)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    watch.head()
    try:
        with run:
            run.go(watch.look)
    except Exception as caught:
        error = caught
    run.report.seconds = run.report.seconds or time.monotonic() - began
    print(run.report)
    grown = not print_growth(watch.samples)
    if flags.operations is None and error is None and not flags.lanes:
        flat = not grown
        print("flat" if flat else "NOT FLAT")
    if error is None:
        print("0 wrong blocks, 0 hangs, nothing left over")
    else:
        print(f"FAILED, seed {flags.seed}: {error}", file=sys.stderr)
    if flags.json:
        flags.json.write_text(json.dumps(record(run.report, error), indent=1) + "\n")
    if error is not None or not flat:
        return 1
    return 130 if run.report.interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
