"""A recorder of the calls of the packages' functions, on all threads."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import remote_server

# That of the packages, which may be those of another checkout.
_ROOT = Path(remote_server.__file__).parents[1]
_PACKAGES = tuple(f"{_ROOT / name}/" for name in ("kv_connector", "remote_server"))

# A thread that waits in one of these is idle: what it does next was handed to it.
_WAITS = ("poll", "wait", "sleep")


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """A call of a function of the packages."""

    at_ns: int
    thread: str
    burst: int
    """Counts the waits of its thread."""
    file: str
    function: str
    within: "Call | None"
    """The call of the packages below it on the stack, with or without vLLM or a library between
    them. One that began before the recording has none below it."""

    @property
    def place(self) -> tuple[str, str]:
        return self.file, self.function

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]


class Recorder:
    """Records calls on all threads that start under `installed`."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._on = False
        self._bursts: dict[str, int] = {}
        self._by_frame: dict[int, Call] = {}
        """The last call of each frame's address."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """The calls on all threads from now on; complete and in order at the end."""
        calls = self._calls = []
        self._by_frame.clear()
        self._on = True
        try:
            yield calls
        finally:
            self._on = False
            calls.sort(key=lambda call: call.at_ns)

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "return" and code.co_name in _WAITS:
            thread = threading.current_thread().name
            self._bursts[thread] = self._bursts.get(thread, 0) + 1
        if self._on and event == "call" and code.co_filename.startswith(_PACKAGES):
            self._calls.append(self._call(frame, self._within(frame)))

    def _within(self, frame: FrameType) -> Call | None:
        below = frame.f_back
        while below is not None:
            if below.f_code.co_filename.startswith(_PACKAGES):
                return self._by_frame.get(id(below)) or self._call(below, None)
            below = below.f_back
        return None

    def _call(self, frame: FrameType, within: Call | None) -> Call:
        thread = threading.current_thread().name
        call = Call(
            time.perf_counter_ns(),
            thread,
            self._bursts.get(thread, 0),
            _relative(frame.f_code.co_filename),
            frame.f_code.co_qualname,
            within,
        )
        self._by_frame[id(frame)] = call
        return call


@cache
def _relative(path: str) -> str:
    return str(Path(path).relative_to(_ROOT))
