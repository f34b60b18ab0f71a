"""The checks of a machine with a GPU: the command of each, what it needs, and its judgement."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.judging import (
    Judge,
    every_row,
    figures_without_errors,
    storage_with_gpu,
)

PRODUCT = ("numpy", "zmq", "msgspec", "xxhash")
"""Modules without which no server and no client of kvferry runs."""

TORCH = ("numpy", "torch")

MANY_CORES = 8
"""Threads and processes side by side: on fewer cores they only share what one has."""

Words = Callable[[Path, Path], Sequence[str]]
"""The words behind `python -m` for a record in this file, and a folder for the check's files."""


@dataclass(frozen=True)
class Check:
    """A command that writes a record."""

    name: str
    words: Words
    most_s: float
    """Seconds after which it counts as hung."""

    judge: Judge
    least_s: float = 10.0
    """Without as much time left it is not begun."""

    needs_gpu: bool = False
    cores: int = 1
    modules: tuple[str, ...] = ()
    rows: str = ".*"
    """The operations that the record of all checks keeps."""

    figures: str = ".*"

    def command(self, record: Path, scratch: Path) -> list[str]:
        return [sys.executable, "-m", *self.words(record, scratch)]


_BASELINE = "benchmarks.remote_kv_cache.baseline"


def _own(module: str, *options: str) -> Words:
    return lambda record, _: [f"benchmarks.gpu_check.{module}", "--json", str(record), *options]


def _of(module: str, *options: str) -> Words:
    return lambda record, _: [module, *options, "--json", str(record)]


CHECKS: tuple[Check, ...] = (
    Check(
        "page-locking", _own("registration"), 90, every_row("page-lock it|it is page-locked"),
        needs_gpu=True, modules=TORCH,
    ),
    Check(
        "copies", _own("copies", "--trials", "3"), 200, every_row(), least_s=30,
        needs_gpu=True, modules=TORCH,
    ),
    Check(
        "swaps of test_memory_io",
        _of(f"{_BASELINE}.test_memory_io", "--models", "3B", "--batches", "4", "--trials", "3"),
        90, every_row("swap in|swap out"), least_s=20, needs_gpu=True,
        modules=("torch", *PRODUCT), rows="swap in|swap out|memcpy|b2b naive",
    ),
    Check(
        "six systems' GPU",
        lambda record, scratch: [
            "benchmarks.six_systems", "--systems", "GPU memory", "shared-memory map",
            "--total", "1GiB", "--trials", "3", "--no-shared-prefix",
            "--directory", str(scratch), "--json", str(record),
        ],
        60, every_row("write|hot read", "GPU memory"), least_s=15, needs_gpu=True,
        modules=("torch", *PRODUCT),
    ),
    Check(
        "mover", _own("mover", "--trials", "3", "--total-mib", "256"), 60, every_row(),
        cores=MANY_CORES, modules=PRODUCT,
    ),
    Check(
        "lanes",
        _of(f"{_BASELINE}.test_server", "--only", "scaling", "--sizes-bytes", "512MiB",
            "--trials", "3"),
        90, every_row(r"\d lanes?: (put|get)"), least_s=20, cores=MANY_CORES, modules=PRODUCT,
    ),
    Check(
        "store_sweep",
        _of("benchmarks.store_sweep", "--concurrency", "1,4,16", "--rounds", "1",
            "--seconds", "3"),
        90, figures_without_errors, least_s=20, modules=PRODUCT,
    ),
    Check(
        "four servers",
        _of("benchmarks.store_sweep", "--servers", "4", "--concurrency", "4,16", "--rounds", "1",
            "--seconds", "3"),
        90, figures_without_errors, least_s=20, cores=MANY_CORES, modules=PRODUCT,
    ),
    Check(
        "storage workload's GPU tier",
        lambda record, scratch: [
            "benchmarks.storage_workload", "--scenario", "quick", "--duration", "60",
            "--gpu-mem-gb", "8", "--cache-dir", str(scratch), "--output", str(record),
        ],
        120, storage_with_gpu, least_s=80, needs_gpu=True, modules=PRODUCT,
        figures=r"verdict|throughput|storage throughput|cache hit rate|gpu .*",
    ),
)  # fmt: skip


def named(text: str) -> list[Check]:
    """The checks whose name has one of these parts, with commas between them. Raises `ValueError`
    for a part that no name has."""
    chosen = []
    for part in text.split(","):
        word = part.strip().lower()
        found = [check for check in CHECKS if word and word in check.name.lower()]
        if not found:
            names = "; ".join(check.name for check in CHECKS)
            raise ValueError(f"{part!r} is in none of: {names}")
        chosen += found
    return [check for check in CHECKS if check in chosen]
