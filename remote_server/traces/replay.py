"""A full replay of a trace at one size: memory with the store's own policy, alone, above a disk or
above a bucket.

A bucket's packs are the store's own too, made of whole blocks of the trace.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from remote_server.store.bucket.upkeep.sweep import Limits
from remote_server.store.stack.admission import Admit
from remote_server.traces.model_bucket import BucketModel, Shape
from remote_server.traces.model_cache import OneLevel, key_of
from remote_server.traces.model_levels import TwoLevels
from remote_server.traces.trace import Trace

POLICY = "learned"
"""The store's default."""

PEAK_S = 60.0
"""The time over which the busiest stretch is counted."""

_SHOWN_EVERY = 256

OnProgress = Callable[[float], object]
"""Called with the share that is done."""


class Prompt(NamedTuple):
    """A request as the store sees it."""

    arrival_s: float
    keys: list[bytes]
    start: int
    """The number of its first block in its prompt."""
    is_put: bool


@dataclass
class Replayed:
    """What one replay found. Counts are blocks of the trace."""

    places: int
    asked: int = 0
    found: int = 0
    written: int = 0
    busiest: int = 0
    """Blocks read and written in the busiest `PEAK_S`."""

    _moved: int = 0
    _stretch: int = 0

    from_disk: int = 0
    """Of those found."""
    from_bucket: int = 0
    puts: int = 0
    """Packs written to the bucket."""
    gets: int = 0
    """Packs and headers read from it."""
    bucket_bytes: int = 0
    """Written to it."""

    def prompt(self, now: float, keys: Sequence[bytes], found: int, written: int) -> None:
        """Count a prompt."""
        self.asked += len(keys)
        self.found += found
        self.stored(now, written, read=found)

    def stored(self, now: float, written: int, *, read: int = 0) -> None:
        """Count blocks that were written, and read."""
        self.written += written
        stretch = int(now / PEAK_S)
        if stretch != self._stretch:
            self.end()
            self._stretch, self._moved = stretch, 0
        self._moved += written + read

    def end(self) -> None:
        """The stretch of time has ended."""
        self.busiest = max(self.busiest, self._moved)

    @property
    def share(self) -> float:
        """Found blocks, of those that prompts ask for."""
        return self.found / self.asked if self.asked else 0.0


def prompts_of(trace: Trace) -> list[Prompt]:
    """The requests of `trace`, with a key for each block."""
    return [
        Prompt(one.arrival_s, [*map(key_of, one.blocks)], start, one.is_put)
        for one, start in zip(trace.requests, trace.starts(), strict=True)
    ]


def replay(
    prompts: Sequence[Prompt],
    places: int,
    block_tokens: int,
    on_progress: OnProgress,
    *,
    disk: int = 0,
    shape: Shape | None = None,
    max_age_s: float = 0.0,
) -> Replayed:
    """`prompts` one after the other at their times, with room for `places` blocks in memory and
    `disk` blocks below it. `shape`: that of a bucket below memory, whose packs go after
    `max_age_s`."""
    if disk:
        return _on_two_levels(prompts, TwoLevels(places, disk, block_tokens), on_progress)
    level, made = OneLevel(places, POLICY, block_tokens), Replayed(places)
    bucket = None
    if shape is not None:
        limits = Limits(max_age_s=max_age_s)
        bucket = BucketModel(shape, Admit.TWICE, limits, level.__contains__)
    for now, keys, start, is_put in _shown(prompts, on_progress):
        if is_put:
            made.stored(now, level.put(now, keys))
            continue
        total = 0
        if bucket is not None:
            bucket.looked_up(now, keys, start)
            total = _found(level, bucket, keys)
            below = [key for key in keys[:total] if key not in level]
            bucket.get(below)
            made.from_bucket += len(below)
        found, written = level.request(now, keys, start=start * block_tokens)
        found = max(found, total)
        if bucket is not None:
            bucket.stored(keys)
        made.prompt(now, keys, found, written)
    made.end()
    level.check()
    if bucket is not None:
        bucket.check()
        made.puts = bucket.requests["put"]
        made.gets = bucket.requests["get"] + bucket.requests["header"]
        made.bucket_bytes = bucket.written_bytes
    return made


def _on_two_levels(
    prompts: Sequence[Prompt], levels: TwoLevels, on_progress: OnProgress
) -> Replayed:
    made = Replayed(levels.memory.capacity)
    for now, keys, start, is_put in _shown(prompts, on_progress):
        if is_put:
            levels.now = now
            made.stored(now, levels.put(keys))
            continue
        levels.looked_up(now, keys, start * levels.block_tokens)
        found = sum(1 for _ in takewhile(levels.holds, keys))
        levels.get(keys[:found])
        made.prompt(now, keys, found, levels.put(keys[found:]))
    made.end()
    made.from_disk = levels.from_disk
    levels.check()
    return made


def _shown(prompts: Sequence[Prompt], on_progress: OnProgress) -> Iterator[Prompt]:
    for number, prompt in enumerate(prompts):
        if number % _SHOWN_EVERY == 0:
            on_progress(number / len(prompts))
        yield prompt


def _found(level: OneLevel, bucket: BucketModel, keys: Sequence[bytes]) -> int:
    """How many of the first `keys` are on either."""
    found = 0
    for key in keys:
        if key not in level and not bucket.holds(key):
            break
        found += 1
    return found
