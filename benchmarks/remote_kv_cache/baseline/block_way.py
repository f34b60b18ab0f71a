"""The way of one block, made of recorded calls: its files, and the folders in their order.

A folder is entered by a call from another one, a callback as well, and not when a call returns. A
function that idle threads call too is on the way if one that they do not call is within it. vLLM
and the start of a thread are outside of all folders. Each thread has its own order, since the order
of their turns is not in the code. The same call from the same function enters a folder once: a loop
or a poll that repeats it adds nothing. A return is an entry into a folder that its thread entered
before.
"""

from collections.abc import Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

from benchmarks.remote_kv_cache.baseline.call_recorder import Call

COMMON = {
    "kv_connector/config.py", "kv_connector/hints.py", "remote_server", "remote_server/protocol",
}  # fmt: skip
"""Folders and files that all others use: settings, hints, values, errors, messages. A call of them
takes the block nowhere: they count as folders, but neither as callers nor as returns."""


class Entry(NamedTuple):
    folder: str
    is_common: bool


class Leg(NamedTuple):
    """The way on one thread."""

    thread: str
    entries: list[Entry]

    @property
    def returns(self) -> int:
        named = (entry.folder for entry in self.entries if not entry.is_common)
        walked = [folder for folder, _ in groupby(named)]
        return len(walked) - len({*walked})


class BlockPath(NamedTuple):
    """The way of one block."""

    name: str
    files: list[str]
    crossings: int
    requests: int
    """Messages that the client sends."""
    legs: list[Leg]
    """One for each thread, in the order in which the block is handed to them."""

    @property
    def threads(self) -> int:
        return len(self.legs)

    @property
    def folders(self) -> list[str]:
        """Each once, in order."""
        entries = chain.from_iterable(leg.entries for leg in self.legs)
        return list(dict.fromkeys(entry.folder for entry in entries))

    @property
    def returns(self) -> int:
        return sum(leg.returns for leg in self.legs)


def way_of(name: str, calls: Sequence[Call], idle: Sequence[Call]) -> BlockPath:
    """The way of a block, from the calls while it was moved and from those of an idle time."""
    always = {call.place for call in idle}
    own = [call for call in calls if call.place not in always]
    bursts = list(dict.fromkeys((call.thread, call.burst) for call in own))
    crossings = sum(one[0] != next_one[0] for one, next_one in pairwise(bursts))
    files = sorted({call.file for call in own})
    requests = sum(call.function == "Connection.send" for call in calls)
    return BlockPath(name, files, crossings, requests, legs_of(own))


def legs_of(calls: Sequence[Call]) -> list[Leg]:
    """The ways of the threads through `calls` and those that they are within."""
    legs: dict[str, Leg] = {}
    seen: set[tuple[str, Any, Any]] = set()
    for call in _with_callers(calls):
        leg = legs.setdefault(call.thread, Leg(call.thread, []))
        caller = _caller_of(call)
        site = (call.thread, caller and caller.place, call.place)
        entry = Entry(call.folder, _is_common(call))
        is_inside = caller is not None and caller.folder == call.folder
        if not is_inside and site not in seen and entry not in leg.entries[-1:]:
            leg.entries.append(entry)
        seen.add(site)
    return list(legs.values())


def _with_callers(calls: Sequence[Call]) -> list[Call]:
    found: set[Call] = set()
    for call in calls:
        each: Call | None = call
        while each is not None and each not in found:
            found.add(each)
            each = each.within
    return sorted(found, key=lambda call: call.at_ns)


def _caller_of(call: Call) -> Call | None:
    """The last one before it that is not common."""
    caller = call.within
    while caller is not None and _is_common(caller):
        caller = caller.within
    return caller


def _is_common(call: Call) -> bool:
    return call.folder in COMMON or call.file in COMMON
