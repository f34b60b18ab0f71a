"""CPU time of both sides of a case: of this process and of all programs that it has started.

Servers of other cases are idle meanwhile.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.machine import process_cpu_s
from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Case, Sample
from benchmarks.harness.statistics import percentile
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.values import GiB


class CpuCost:
    """Of the cases of one model."""

    def __init__(self) -> None:
        self._spent: dict[Hashable, list[float]] = {}

    def of(self, case: Case) -> Case:
        """The same case, whose CPU seconds are noted for each run that completes."""
        spent = self._spent.setdefault(case.key, [])

        def run() -> None:
            before = _all_cpu_s()
            case.run()
            spent.append(_all_cpu_s() - before)

        return replace(case, run=run)

    def figures(
        self, model: str, num_bytes: int, samples: Mapping[Hashable, Sample],
        variants: Sequence[Variant], wall: Variant | None = None,
    ) -> list[Figure]:  # fmt: skip
        """CPU seconds a GiB of those that were measured: medians, and times those of `wall`
        if there is one."""
        seconds = {
            variant: percentile(samples[variant].timed(self._spent[variant]), 50)
            / (num_bytes / GiB)
            for variant in (*([wall] if wall else []), *variants)
            if variant in samples and samples[variant].measured
        }
        if not seconds:
            return []
        values = {str(variant): each for variant, each in seconds.items()}
        figures = [Figure(f"{model}: CPU of both sides", "s/GiB", values, "tcp")]
        if wall and seconds.get(wall):
            ratios = {
                str(variant): each / seconds[wall]
                for variant, each in seconds.items()
                if variant != wall
            }
            name = f"{model}: CPU of both sides, beside raw"
            figures.append(Figure(name, "times", ratios, "tcp"))
        return figures


def _all_cpu_s() -> float:
    return time.process_time() + sum(map(_cpu_s, _children()))


def _children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def _cpu_s(pid: int) -> float:
    try:
        return process_cpu_s(pid)
    except OSError:  # it has ended
        return 0.0
