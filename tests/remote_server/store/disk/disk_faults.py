"""A disk in memory that can stop after any write, tear it, or lose what was not made permanent."""

import ctypes
import errno
import random
from collections import deque
from collections.abc import Callable

import xxhash

from remote_server.native.job import Kind
from remote_server.store.disk.files import Moved
from remote_server.store.disk.segments import OVERHEAD_BYTES
from remote_server.store.pages import Scratch

SECTOR = 512


class Crash(BaseException):
    """The process, or the machine, is gone."""


class FakeFile:
    direct = False

    def __init__(self, disk: "FakeDisk", num_bytes: int) -> None:
        self._disk = disk
        self.data = bytearray(num_bytes)
        self.durable = bytearray(num_bytes)
        self._since_sync: list[tuple[int, bytes]] = []
        self.open = True
        self.bad: set[range] = set()  # places that cannot be read

    def move(self, kind, addresses, offsets, lengths, seeds=None):
        assert self.open, "moved in a closed file"
        memory = [memory_at(*place) for place in zip(addresses, lengths, strict=True)]
        places = [range(at, at + length) for at, length in zip(offsets, lengths, strict=True)]
        assert max(place.stop for place in places) <= len(self.data), "moved behind the end"
        errors = [0] * len(places)
        if kind is Kind.READ:
            for index, (place, view) in enumerate(zip(places, memory, strict=True)):
                if any(bad.start < place.stop and place.start < bad.stop for bad in self.bad):
                    errors[index] = errno.EIO
                else:
                    view[:] = self.data[place.start : place.stop]
        else:
            errors = self._write(
                [(place.start, bytes(view)) for place, view in zip(places, memory, strict=True)]
            )
        return Moved(errors, [*map(xxhash.xxh3_64_intdigest, memory, seeds or [0] * len(places))])

    def _write(self, parts: list[tuple[int, bytes]]) -> list[int]:
        try:
            self._disk.maybe_fail()
        except OSError as error:
            return [error.errno] * len(parts)
        if self._disk.burn():
            self._tear(parts)
            raise Crash
        for offset, part in parts:
            self._apply(part, offset)
        return [0] * len(parts)

    def sync(self):
        if self._disk.burn():
            raise Crash
        self.make_durable()

    def close(self):
        assert self.open, "closed twice"
        self.open = False
        self._disk.forget_closed()

    def make_durable(self):
        for offset, part in self._since_sync:
            self.durable[offset : offset + len(part)] = part
        self._since_sync.clear()

    def cut_power(self, rng: random.Random) -> None:
        """Of what was not made permanent, any sectors arrived, in any order."""
        for offset, part in self._since_sync:
            for start in range(0, len(part), SECTOR):
                if rng.random() < 0.6:
                    sector = part[start : start + SECTOR]
                    self.durable[offset + start : offset + start + len(sector)] = sector
        self._since_sync.clear()
        self.data = bytearray(self.durable)

    def _apply(self, part: bytes, offset: int) -> None:
        self.data[offset : offset + len(part)] = part
        self._since_sync.append((offset, part))

    def _tear(self, parts: list[tuple[int, bytes]]) -> None:
        rng = self._disk.rng
        is_cut = rng.random() < 0.5
        left = rng.randrange(sum(len(part) for _, part in parts) + 1)
        for offset, part in parts:
            if is_cut:
                self._apply(part[:left], offset)
                left = max(0, left - len(part))
                continue
            for start in range(0, len(part), SECTOR):
                if rng.random() < 0.5:
                    self._apply(part[start : start + SECTOR], offset + start)


def memory_at(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


class FakeDisk:
    """`Files` in memory. It stops (`Crash`) at the operation that `fuse` counts down to, and
    asserts at each that the files have not grown beyond `budget`."""

    def __init__(self, budget: int, rng: random.Random) -> None:
        self.budget = budget
        self.rng = rng
        self.fuse: int | None = None
        self.num_operations = 0
        self.fail_with: Callable[[], OSError | None] = lambda: None
        self._names: dict[str, FakeFile] = {}
        self._durable_names: dict[str, FakeFile] = {}
        self._unlinked: list[FakeFile] = []
        self._log: list[Callable[[dict[str, FakeFile]], object]] = []

    def names(self):
        return [*self._names]

    def create(self, name, num_bytes):
        self.maybe_fail()
        assert name not in self._names
        if self.burn():
            raise Crash
        file = FakeFile(self, num_bytes)
        self._change(lambda names: names.__setitem__(name, file))
        assert OVERHEAD_BYTES + self.used_bytes <= self.budget, "beyond the budget"
        return file

    def open(self, name):
        file = self._names[name]
        file.open = True
        return file, len(file.data)

    def rename(self, old, new):
        if self.burn():
            raise Crash
        self._change(lambda names: names.__setitem__(new, names.pop(old)))

    def remove(self, name):
        if name not in self._names:
            raise FileNotFoundError(name)
        if self.burn():
            raise Crash
        self._unlinked.append(self._names[name])
        self._change(lambda names: names.pop(name))
        self.forget_closed()

    def sync(self):
        if self.burn():
            raise Crash
        self._durable_names = dict(self._names)
        self._log.clear()

    @property
    def used_bytes(self) -> int:
        return sum(len(f.data) for f in (*self._names.values(), *self._unlinked))

    def forget_closed(self) -> None:
        self._unlinked = [file for file in self._unlinked if file.open]

    def burn(self) -> bool:
        """Count an operation; True when it is the last one."""
        self.num_operations += 1
        return self.fuse is not None and self.num_operations >= self.fuse

    def maybe_fail(self) -> None:
        if (error := self.fail_with()) is not None:
            raise error

    def reboot(self, *, power_cut: bool) -> None:
        """What the next server finds. Without a power cut the kernel kept all that was done."""
        self.fuse = None
        self.num_operations = 0
        if power_cut:
            for change in self._log[: self.rng.randrange(len(self._log) + 1)]:
                change(self._durable_names)
            self._names = dict(self._durable_names)
            for file in self._names.values():
                file.cut_power(self.rng)
        self._unlinked.clear()
        self._durable_names = dict(self._names)
        self._log.clear()
        for file in self._names.values():
            file.open = False
            file.make_durable()

    def _change(self, change: Callable[[dict[str, FakeFile]], object]) -> None:
        change(self._names)
        self._log.append(change)


class SteppedPool:
    """A pool without threads: jobs run when the test runs them, in the order of a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list = []
        self._done: deque = deque()
        self._scratch = Scratch()
        self._woken = False

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._done)

    def submit(self, job):
        self._waiting.append(job)

    def wake(self):
        self._woken = True

    def stop(self):
        self._waiting.clear()

    def finish_jobs(self):
        for _ in range(len(self._done)):
            job = self._done.popleft()
            job.finish(job.result)

    def step(self) -> bool:
        """Run one of the waiting jobs, whichever. False when there was none."""
        if not self._waiting:
            return False
        job = self._waiting.pop(self._rng.randrange(len(self._waiting)))
        job.run(self._scratch)
        self._done.append(job)
        return True

    def tear_others(self) -> None:
        """After a crash: what other threads were in the middle of."""
        for job in self._rng.sample(self._waiting, min(3, len(self._waiting))):
            try:
                job.work(self._scratch)
            except (Crash, OSError):
                continue
