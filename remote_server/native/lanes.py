"""The native lanes, and the choice between them and the reference in Python."""

import errno
import os
from array import array
from socket import socket
from weakref import finalize

from remote_server.errors import LaneBroken, MoverClosed
from remote_server.native.handle import Handle
from remote_server.native.lane_base import CLOSED, Broken, LaneJob, Lanes
from remote_server.native.library import Library
from remote_server.native.mover import MAX_THREADS, library_or_reason
from remote_server.native.reference_lanes import ReferenceLanes
from remote_server.native.tls import NativeTls
from remote_server.native.tls_base import TlsConnection

_REAPED_AT_ONCE = 64


def make_lanes(threads: int) -> Lanes:
    """Native lanes, or reference lanes without a library; see `make_mover`. Raises `ConfigError`
    and `OSError`."""
    if not 0 < threads <= MAX_THREADS:
        raise ValueError(f"lanes on {threads} threads")
    library = library_or_reason()
    if isinstance(library, Library):
        return NativeLanes(library, threads)
    return ReferenceLanes(threads)


class _Engine(Handle):
    """The lanes in C and their jobs. The library wants one call at a time."""

    def __init__(self, library: Library, threads: int) -> None:
        super().__init__(library.lanes_new(threads), f"lanes on {threads} threads")
        self.jobs: dict[int, LaneJob] = {}
        """Submitted and not reaped, by the address of the entry in C."""
        self.lanes: dict[int, int] = {}
        """The address of a lane in C by its number, until it is closed or reported."""
        self.numbers: dict[int, int] = {}
        """The other way around."""
        self._free = library.lanes_free

    def close(self) -> None:
        if self.is_foreign:
            return
        with self.lock:  # a second call returns no earlier
            address, self.address = self.address, None
            if address is not None:
                self._free(address)
                self.lanes.clear()
                self.numbers.clear()


class NativeLanes(Lanes):
    """The lanes in C. Each belongs to one of the threads, the one that had the fewest."""

    def __init__(self, library: Library, threads: int) -> None:
        self.threads = threads
        self._library = library
        self._engine = _Engine(library, threads)
        self._opened = 0
        self._ended = array("Q", [0]) * _REAPED_AT_ONCE
        self._errors = array("i", [0]) * _REAPED_AT_ONCE
        self._ended_at = self._ended.buffer_info()[0]
        self._errors_at = self._errors.buffer_info()[0]
        # At exit, before the interpreter frees the memory of running jobs.
        finalize(self, self._engine.close)

    def fileno(self) -> int:
        descriptor = self._engine.descriptor(self._library.lanes_descriptor)
        if descriptor is None:
            raise MoverClosed(CLOSED)
        return descriptor

    def open(self, connection: socket | TlsConnection) -> int:
        if isinstance(connection, TlsConnection) and not isinstance(connection, NativeTls):
            raise TypeError(f"TLS of another kind: {type(connection).__name__}")
        tls = connection.address if isinstance(connection, NativeTls) else None
        engine = self._engine
        if engine.is_foreign:
            raise MoverClosed(CLOSED)
        with engine.lock:
            if engine.address is None:
                raise MoverClosed(CLOSED)
            lane = self._library.lanes_open(engine.address, connection.fileno(), tls)
            if lane < 0:
                raise OSError(-lane, os.strerror(-lane))
            connection.detach()
            self._opened += 1
            engine.lanes[self._opened] = lane
            engine.numbers[lane] = self._opened
            return self._opened

    def submit(self, lane: int, job: LaneJob) -> None:
        engine = self._engine
        if engine.is_foreign:
            raise MoverClosed(CLOSED)
        with engine.lock:
            if job.number:
                raise ValueError("the job is submitted already")
            if engine.address is None:
                raise MoverClosed(CLOSED)
            address = engine.lanes.get(lane)
            entry = -errno.ENOTCONN
            if address is not None:
                entry = self._library.lanes_submit(engine.address, address, job.header)
            if entry > 0:
                job.number, job.lane = entry, lane
                engine.jobs[entry] = job
                return
        if entry == -errno.ENOTCONN:
            raise LaneBroken(f"lane {lane} is broken or closed")
        raise OSError(-entry, os.strerror(-entry))

    def abandon(self, job: LaneJob) -> None:
        engine = self._engine
        if engine.is_foreign:
            return
        with engine.lock:
            if engine.jobs.get(job.number) is not job:
                return
            if engine.address is not None:
                self._library.lanes_abandon(engine.address, job.number)
            del engine.jobs[job.number]
            job.number, job.keep = 0, None

    def reap(self) -> tuple[list[LaneJob], list[Broken]]:
        jobs: list[LaneJob] = []
        broken: list[Broken] = []
        engine = self._engine
        if engine.is_foreign:
            return jobs, broken
        with engine.lock:
            if engine.address is None:
                jobs += engine.jobs.values()
                engine.jobs.clear()
            else:
                self._reap(engine.address, jobs, broken)
            for job in jobs:
                job.number = 0
        return jobs, broken

    def _reap(self, address: int, jobs: list[LaneJob], broken: list[Broken]) -> None:
        engine = self._engine
        count = _REAPED_AT_ONCE
        while count == _REAPED_AT_ONCE:
            count = self._library.lanes_reap(
                address, self._ended_at, self._errors_at, _REAPED_AT_ONCE
            )
            for ended, error in zip(self._ended[:count], self._errors, strict=False):
                if error < 0:
                    jobs.append(engine.jobs.pop(ended))
                else:
                    number = engine.numbers.pop(ended)
                    del engine.lanes[number]
                    broken.append((number, error))

    def close_lane(self, lane: int) -> None:
        engine = self._engine
        if engine.is_foreign:
            return
        with engine.lock:
            address = engine.lanes.pop(lane, None)
            if address is not None and engine.address is not None:
                self._library.lanes_close_lane(engine.address, address)
                del engine.numbers[address]

    def close(self) -> None:
        self._engine.close()
