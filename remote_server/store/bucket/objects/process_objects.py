"""The object store behind a process of its own: `Objects` whose calls go to `store_calls`."""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import remote_server
from remote_server.store.bucket.objects.channel import Call, Channel, ChannelEnded, Ended, copy
from remote_server.store.bucket.objects.client import CALL_TIMEOUT, MAX_RETRIES, open_store
from remote_server.store.bucket.objects.objects import (
    Body,
    BucketError,
    Failure,
    Head,
    Listed,
    Objects,
)

log = logging.getLogger(__name__)

LONGEST_CALL_S = (1 + MAX_RETRIES) * CALL_TIMEOUT.total_seconds() + 5.0
"""The client ends each call itself before this, but for those of a file system that hangs."""

KEPT_BYTES = 128 << 20
"""Memory of all channels that no call has: what a read finds there costs no page faults, which take
three times as long as its bytes. The rest is given back to the machine."""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
"""After a process has died none is started for this time, which doubles until a call ends well."""


class ProcessObjects(Objects):
    """`Objects` of a process of its own, which is started by the first call, and again after it has
    died. Any thread; as many calls at a time as there are channels, and others wait."""

    def __init__(
        self, url: str, num_channels: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises `ConfigError` for a wrong address or a missing client."""
        open_store(url)  # it raises, and makes the folder of a `file://`
        self.url = url
        self._clock = clock
        self._num_channels = num_channels
        self._lock = threading.Condition()
        self._process: _Process | None = None
        self._pause_s, self._closed_until = FIRST_PAUSE_S, 0.0
        self._is_closed = False

    # ── calls ────────────────────────────────────────────────────────────────────────────

    def put(self, name: str, data: Body, *, create: bool = True) -> bool:
        every = [data] if isinstance(data, memoryview) else [memoryview(each) for each in data]
        pieces = [piece for piece in every if piece.nbytes]
        num_bytes = sum(piece.nbytes for piece in pieces)
        with self._channel() as channel:
            memory, end = channel.memory(num_bytes), 0
            for piece in pieces:
                copy(memory[end : end + piece.nbytes], piece)
                end += piece.nbytes
            made = self._call(channel, Call("put", [name], end=num_bytes, create=create))
        return bool(made)

    @contextmanager
    def reading(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        with self._channel() as channel:
            yield self._read(channel, name, begin, end, all_of_it=True)

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        with self._channel() as channel:
            return memoryview(bytes(self._read(channel, name, begin, end, all_of_it=all_of_it)))

    def read_head(self, name: str, num_bytes: int) -> Head:
        with self._channel() as channel:
            num, size, modified = self._call(channel, Call("head", [name], end=num_bytes))
            return Head(memoryview(bytes(channel.memory(num))), size, modified)

    def size_of(self, name: str) -> int | None:
        with self._channel() as channel:
            size = self._call(channel, Call("size", [name]))
        return None if size is None else int(size)

    def remove(self, names: Sequence[str]) -> None:
        if names:
            with self._channel() as channel:
                self._call(channel, Call("remove", [*names]))

    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        with self._channel() as channel:
            chunk = self._call(channel, Call("list", [prefix]))
            while chunk is not None:
                yield [Listed(*each) for each in chunk]
                chunk = self._call(channel, Call("next"))

    def folders(self, prefix: str) -> list[str]:
        with self._channel() as channel:
            return [*self._call(channel, Call("folders", [prefix]))]

    def remove_unfinished(self, prefix: str, before: float) -> None:
        with self._channel() as channel:
            self._call(channel, Call("unfinished", [prefix], before=before))

    def close(self) -> None:
        """End the process. Calls under way and later ones fail."""
        with self._lock:
            self._is_closed = True
            process, self._process = self._process, None
            self._lock.notify_all()
            if process is not None:
                process.end()

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _read(
        self, channel: Channel, name: str, begin: int, end: int, *, all_of_it: bool
    ) -> memoryview:
        """The view is the channel's memory."""
        num = int(self._call(channel, Call("read", [name], begin, end)))
        if num > end - begin or (all_of_it and num < end - begin):
            raise BucketError(Failure.SHORT, f"{num} of {end - begin} bytes of {name}")
        return channel.memory(num)

    def _call(self, channel: Channel, call: Call) -> Any:
        try:
            channel.wait_at_most(LONGEST_CALL_S)
            channel.send(call)
            ended = channel.receive(Ended)
        except ChannelEnded as error:
            raise _Lost(str(error)) from error
        if ended.failure:
            raise BucketError(Failure(ended.failure), ended.words)
        self._pause_s = FIRST_PAUSE_S
        return ended.result

    @contextmanager
    def _channel(self) -> Iterator[Channel]:
        """A channel for one call. Raises `BucketError` where no process can be had, and when the
        process is lost meanwhile."""
        process, channel = self._take()
        try:
            yield channel
        except _Lost as lost:
            self._lose(process, str(lost))
            raise BucketError(Failure.LOST, f"the process of its calls is lost: {lost}") from lost
        except OSError as error:  # there is no memory for it
            raise BucketError(Failure.OTHER, str(error)) from error
        finally:
            with self._lock:
                process.give_back(channel)
                self._lock.notify()

    def _take(self) -> "tuple[_Process, Channel]":
        with self._lock:
            while not self._is_closed:
                if self._process is None:
                    self._process = self._start()
                if self._process.free:
                    return self._process, self._process.free.pop()
                self._lock.wait()
        raise BucketError(Failure.OTHER, "the server ends")

    def _start(self) -> "_Process":
        """Raises `BucketError`."""
        if self._clock() < self._closed_until:
            raise BucketError(Failure.OTHER, "the process of its calls is to be started again")
        try:
            return _Process(self.url, self._num_channels)
        except OSError as error:
            self._pause()
            why = f"the process of its calls cannot be started: {error}"
            raise BucketError(Failure.OTHER, why) from error

    def _lose(self, process: "_Process", why: str) -> None:
        """`process` has died, or a call hangs in it."""
        with self._lock:
            if process is not self._process:
                return
            self._process = None
            self._pause()
            self._lock.notify_all()
            process.end()
        log.error("bucket: the process that calls %s is lost, and started again: %s", self.url, why)

    def _pause(self) -> None:
        self._closed_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


class _Lost(Exception):
    """The process has not answered: it is dead, or hangs."""


class _Process:
    """A running process, and its channels: those that no call has now in `free`. The caller holds
    a lock."""

    def __init__(self, url: str, num_channels: int) -> None:
        """Raises `OSError`."""
        self.free: list[Channel] = []
        self._is_ended = False
        with ExitStack() as ours, ExitStack() as theirs:
            self._life, life = socket.socketpair()
            ours.enter_context(self._life)
            theirs.enter_context(life)
            arguments, inherited = [], [life.fileno()]
            for _ in range(num_channels):
                near, far = socket.socketpair()
                theirs.enter_context(far)
                ours.enter_context(near)
                memory = os.memfd_create("kvferry-bucket")
                self.free.append(Channel(near, memory))
                ours.callback(self.free[-1].close)
                arguments.append(f"{far.fileno()}:{memory}")
                inherited += far.fileno(), memory
            self._all = [*self.free]
            self._child = subprocess.Popen(
                [sys.executable, "-m", _MODULE, url, str(life.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=os.environ | {"PYTHONPATH": _python_path(), **_ALLOCATOR},
            )
            ours.pop_all()

    def give_back(self, channel: Channel) -> None:
        if self._is_ended:
            channel.close()
            return
        if channel.num_resident + sum(one.num_resident for one in self.free) > KEPT_BYTES:
            channel.empty_memory()
        self.free.append(channel)

    def end(self) -> None:
        """End the process. Calls under way end by `ChannelEnded`."""
        self._is_ended = True
        self._life.close()
        self._child.kill()
        for channel in self._all:
            channel.cut()
        while self.free:
            self.free.pop().close()
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, and is left there
            self._child.wait(1.0)


_MODULE = "remote_server.store.bucket.objects.store_calls"

_ALLOCATOR = {"MALLOC_ARENA_MAX": "1"}
"""glibc keeps freed bodies, of several sizes, for each thread: up to 340 MiB of 24 threads, beside
128 MiB under way. Of one arena for all it keeps what was under way at most."""


def _python_path() -> str:
    """This installation's folder before any other."""
    own = str(Path(remote_server.__file__).parents[1])
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])
