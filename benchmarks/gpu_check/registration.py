"""Page-locking: can CUDA lock a pool of another process, and is a failure seen?

    python -m benchmarks.gpu_check.registration --json registration.json

The pool is a sealed file in memory, opened through /proc/PID/fd, as an engine's workers open it.
The other process then writes bytes that the device must see, and reads the device's.
"""

import argparse
import hashlib
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_check import child
from benchmarks.gpu_check.device import Device
from benchmarks.gpu_check.mapped_pool import MappedPool
from benchmarks.gpu_check.pool_holder import FILLED_BYTES, pattern
from benchmarks.harness import machine
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Case, Runner, Skipped, WrongBytes
from benchmarks.remote_kv_cache.baseline.copies.device_copies import Pieces

MODULE = "benchmarks.gpu_check.registration"

LOCKED = "it is page-locked"
LOCK = "page-lock it"
_MIB = 1 << 20
_COPIED = 256 * _MIB


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write, print. Exit status 1 when a row failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = child.parser(MODULE, __doc__)
    parser.add_argument(
        "--region-mib", type=child.positive, default=4096, metavar="N",
        help="size of the pool, at most half of the free memory (default: %(default)s)",
    )  # fmt: skip
    return child.run(MODULE, argv, parser.parse_args(argv), measure)


def measure(device: Device, record: Record, runner: Runner, arguments: argparse.Namespace) -> None:
    """The steps in their order, then the speed of copies with and without page-locking."""
    region_mib = max(1, min(arguments.region_mib, machine.available_bytes() // 2 // _MIB))
    num_bytes = region_mib * _MIB
    title = f"a pool of {region_mib} MiB"
    opened = Case("open and map it", partial(_open, device, num_bytes))
    if not _add(record, title, 0, runner.measure(title, [opened])):
        return
    with MappedPool(device, num_bytes) as pool:
        record.parameters["pool"] = pool.way
        steps = Steps(device, pool)
        for case, amount in steps.cases():
            _add(record, title, amount, runner.measure(title, [case]))
            child.write(record, arguments)
            if runner.interrupted:
                return
        record.parameters["page-locked"] = pool.is_pinned() if device.is_gpu else "no GPU"
        _speeds(device, pool, record, runner, arguments.trials)
        child.write(record, arguments)
        # Last: if CUDA's runtime keeps this error, no call of torch follows that would raise it.
        last = Case("a registration that fails is seen", steps.fails_visibly)
        _add(record, title, 0, runner.measure(title, [last]))


def _add(record: Record, title: str, num_bytes: int, samples: dict[Any, Any]) -> bool:
    """Add the rows. Returns whether all were measured."""
    record.rows += [Row(title, str(key), num_bytes, sample) for key, sample in samples.items()]
    return all(sample.measured for sample in samples.values())


def _open(device: Device, num_bytes: int) -> None:
    with MappedPool(device, num_bytes):
        pass


class Steps:
    """What must hold of a pool that another process has made."""

    def __init__(self, device: Device, pool: MappedPool) -> None:
        self._device, self._pool = device, pool

    def cases(self) -> list[tuple[Case, int]]:
        """In their order, each with the bytes that it concerns."""
        steps: list[tuple[str, Callable[[], object], int]] = [
            ("fault its pages in", self._pool.populate, self._pool.num_bytes),
            ("before: it is reported as pageable", self._is_pageable, 0),
            (LOCK, self.lock, self._pool.num_bytes),
            (LOCKED, self.is_locked, 0),
            ("the device reads what the other process wrote", self.device_reads, FILLED_BYTES),
            ("the other process reads what the device wrote", self.device_writes, FILLED_BYTES),
            ("an ordinary map is reported as pageable", self.ordinary_is_pageable, 0),
        ]
        return [(Case(name, do), amount) for name, do, amount in steps]

    def _is_pageable(self) -> None:
        if self._pool.is_pinned():
            raise AssertionError("CUDA reports a pool as page-locked that was not registered")

    def lock(self) -> None:
        self._skip_without_gpu()
        if not self._pool.lock():
            raise AssertionError(f"cudaHostRegister returned {self._pool.lock_error}")

    def is_locked(self) -> None:
        self._skip_without_gpu()
        if not self._pool.is_pinned():
            raise AssertionError("CUDA reports the pool as pageable")

    def device_reads(self) -> None:
        number = int(self._pool.ask("fill"))
        found = self._move(load=True).cpu().numpy().tobytes()
        if found != pattern(number):
            raise WrongBytes("the device has other bytes than the other process wrote")

    def device_writes(self) -> None:
        self._pool.ask("fill")
        target = self._move(load=False, value=0x3C)
        digest = hashlib.blake2b(target.cpu().numpy().tobytes()).hexdigest()
        if self._pool.ask("digest") != digest:
            raise WrongBytes("the other process has other bytes than the device wrote")

    def ordinary_is_pageable(self) -> None:
        with mmap.mmap(-1, _MIB) as ordinary:
            tensor = self._device.torch.frombuffer(ordinary, dtype=self._device.torch.uint8)
            is_pinned = bool(tensor.is_pinned())
            del tensor
        if is_pinned:
            raise AssertionError("CUDA reports an ordinary map as page-locked")

    def fails_visibly(self) -> None:
        """The same registration again fails."""
        self._skip_without_gpu()
        if not self._pool.is_locked:
            raise Skipped("the pool is not page-locked")
        if self._pool.lock():
            raise AssertionError("a second registration of the same pool succeeded")

    def _move(self, *, load: bool, value: int = 0) -> Any:
        """The device's tensor after a copy from the pool's start, or to it."""
        torch = self._device.torch
        tensor = torch.full((FILLED_BYTES,), value, dtype=torch.uint8, device=self._device.name)
        self._device.synchronize()
        pieces = _one(tensor.data_ptr(), self._pool.address, FILLED_BYTES)
        self._device.copies.one_by_one(pieces, load=load)
        self._device.copies.wait()
        return tensor

    def _skip_without_gpu(self) -> None:
        if not self._device.is_gpu:
            raise Skipped("the device is a CPU")


def _one(on_device: int, on_host: int, size: int) -> Pieces:
    return Pieces(*(np.array([value], np.uint64) for value in (on_device, on_host, size)))


def _speeds(device: Device, pool: MappedPool, record: Record, runner: Runner, trials: int) -> None:
    """One large copy each way, of the pool and of ordinary memory."""
    size = min(_COPIED, pool.num_bytes)
    ordinary = np.ones(size, np.uint8)
    tensor = device.torch.zeros(size, dtype=device.torch.uint8, device=device.name)
    device.synchronize()
    cases = []
    for name, address in (("pool", pool.address), ("ordinary memory", ordinary.ctypes.data)):
        pieces = _one(tensor.data_ptr(), address, size)
        for load in (True, False):
            direction = "to the device" if load else "from the device"

            def copy(pieces: Pieces = pieces, load: bool = load) -> None:
                device.copies.one_by_one(pieces, load=load)
                device.copies.wait()

            cases.append(Case(f"{name}, {direction}", copy))
    runner.trials, before = trials, runner.trials
    samples = runner.measure("one large copy", cases)
    runner.trials = before
    _add(record, "one large copy", size, samples)


if __name__ == "__main__":
    sys.exit(main())
