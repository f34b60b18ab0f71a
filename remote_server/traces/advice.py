"""Advice for a trace: what it finds at each size, what holds that, and what that costs a month.

Every share is of a full replay with the store's own policy. A disk finds as much as memory of its
size: memory above it holds copies, which add speed and no room.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remote_server.store.bucket.opening import SWEEP_EVERY_S
from remote_server.traces.model_bucket import Shape
from remote_server.traces.prices import GB, MONTH_S, BucketBill, Prices, bucket_bill
from remote_server.traces.replay import PEAK_S, Prompt, Replayed, prompts_of, replay
from remote_server.traces.trace import Trace, TraceError, distinct
from remote_server.values import GiB, MiB, format_bytes, written_size

HALVINGS = 6
"""From all blocks down to a sixty-fourth of them."""

BISECTIONS = 3

ENOUGH = 0.01
"""A share of the prompt tokens: more room that brings less than this is not worth it."""

MOST_BLOCKS = 1_000_000
"""Asked for in a replay; a longer trace is counted in larger blocks."""

MOST_COUNTED, LEAST_KEPT = 4096, 0.9
"""Tokens of such a block, and the share of the tokens that must still be in whole blocks."""

ROW_TOKENS, MOST_ROWS = 64, 256
"""Of a bucket's packs, or fewer where the trace's blocks are smaller; rows of a block."""

PACK_BYTES, BUCKET_DAYS, BUCKET_WRITES, DISK_WRITES = 16 * MiB, 7, 50 * MiB, 20 * MiB
"""The server's defaults."""

SPARE = 1.25
"""A rate in a command is at least so many times the mean."""

LEAST_S = 1.0

MEMORY, DISK, BUCKET = "memory", "disk", "bucket below"

DISK_PART, MOST_ABOVE_DISK = 8, 64 * GiB
"""Memory above a disk is one such part of it, and at most so much: it adds no room."""

Show = Callable[[str], object]
"""Called with a line about the progress."""


class Given(NamedTuple):
    """What the user knows. Rates are a second, prices are dollars a month."""

    kv_bytes: int
    """Of a token."""
    prefill_tokens: float
    """That an engine computes."""
    server_memory: int
    link_bytes: float
    """Of one server."""
    disk_writes: int
    """Bytes that one server's disk may be written, for years."""
    memory_price: float
    """Of a GiB."""
    disk_price: float
    """Of a GB."""
    bucket_prices: Prices


@dataclass(frozen=True)
class Room:
    """A size of one level, and what it finds."""

    num_bytes: int
    share: float
    """Of the prompt tokens in whole blocks."""
    saved_s: float
    """Until the first token, in the mean of all prompts."""


@dataclass(frozen=True)
class Way:
    """Servers that hold the advised room, or less of it above a bucket."""

    name: str
    servers: int
    memory: int
    """Bytes of each server."""
    disk: int
    """Bytes of each server; 0: none."""
    share: float
    saved_s: float
    dollars: float
    """A month, of all servers."""
    below: float = 0.0
    """Of the share, that of the disk or the bucket."""
    disk_writes: int = 0
    """Bytes a second that each server writes there."""
    bucket_requests: float = 0.0
    """A month."""
    bill: BucketBill | None = None
    bucket_writes: int = 0
    """Bytes a second that each server writes there."""

    def serve(self, disk_writes: int) -> str:
        """The command of each server, whose disk may be written that fast."""
        flags = [f"--memory {_written(self.memory)}"]
        if self.disk:
            flags += ["--disk /var/lib/kvferry", f"--disk-bytes {_written(self.disk)}"]
            if SPARE * self.disk_writes > DISK_WRITES:
                flags.append(f"--disk-write-rate {written_size(disk_writes)}")
        if self.bill is not None:
            flags.append("--bucket s3://kv-cache/prod")
            if self.bucket_writes > BUCKET_WRITES:
                rate = math.ceil(SPARE * self.bucket_writes / MiB)
                flags.append(f"--bucket-write-rate {rate}MiB")
        return " ".join(["kvferry serve", *flags])


@dataclass(frozen=True)
class Advice:
    """The answer for one trace."""

    prompts: int
    seconds: float
    prompt_tokens: int
    """In whole blocks."""
    block_tokens: int
    """Of the blocks that are counted here."""
    all_bytes: int
    """Of all different blocks."""
    can_be_found: float
    """The share with room for all blocks."""
    computed_s: float
    """Until the first token without a cache, in the mean of all prompts."""
    rooms: tuple[Room, ...]
    advised: Room
    """From here on more room brings less than `ENOUGH`."""
    busiest_bytes: float
    """Read and written a second in the busiest minute, with that room."""
    ways: tuple[Way, ...]
    best: Way | None
    """The cheapest that finds as much; None where a cache gives nothing."""
    why_none: str = ""
    """The reason for that, as a sentence."""


class _Study:
    """The replays of one trace, each made once."""

    def __init__(self, trace: Trace, given: Given, show: Show) -> None:
        self.trace, self.given = trace, given
        self.prompts: list[Prompt] = prompts_of(trace)
        self.block_bytes = trace.block_tokens * given.kv_bytes
        self.everything = distinct(trace.requests)
        self.num_prompts = sum(not one.is_put for one in self.prompts)
        self.seconds = trace.requests[-1].arrival_s
        row = math.gcd(ROW_TOKENS, trace.block_tokens)
        if trace.block_tokens // row > MOST_ROWS:
            row = trace.block_tokens
        self.shape = Shape(given.kv_bytes, row, PACK_BYTES, trace.block_tokens)
        self._show = show
        self._made: dict[tuple[int, int, bool], Replayed] = {}

    def at(self, places: int, *, disk: int = 0, bucket: bool = False) -> Replayed:
        """The replay with room for `places` blocks, and below for `disk` blocks, or a bucket."""
        places = max(1, min(places, self.everything))
        if (places, disk, bucket) not in self._made:
            below = ", a disk below" if disk else ", a bucket below" if bucket else ""
            room = format_bytes(places * self.block_bytes)
            line = f"replay {len(self._made) + 1}: {room}{below}"
            self._made[places, disk, bucket] = replay(
                self.prompts, places, self.trace.block_tokens,
                lambda done: self._show(f"{line}, {100 * done:.0f} %"), disk=disk,
                shape=self.shape if bucket else None, max_age_s=BUCKET_DAYS * 86_400.0,
            )  # fmt: skip
        return self._made[places, disk, bucket]

    def room(self, places: int) -> Room:
        made = self.at(places)
        return Room(made.places * self.block_bytes, made.share, self.saved_s(made))

    def saved_s(self, made: Replayed) -> float:
        """Loading takes the place of computing, where it is faster."""
        given = self.given
        a_token = 1 / given.prefill_tokens - given.kv_bytes / given.link_bytes
        tokens = made.found * self.trace.block_tokens / self.num_prompts
        return max(0.0, a_token * tokens)

    def advised(self) -> int:
        """The places from which more brings less than `ENOUGH`."""
        enough = self.at(self.everything).share - ENOUGH
        high = self.everything
        while high > 1 and self.at(high // 2).share >= enough:
            high //= 2
        low = high // 2
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            if low < middle < high:
                low, high = (low, middle) if self.at(middle).share >= enough else (middle, high)
        return high

    def by_link(self, made: Replayed) -> int:
        """Servers whose links carry the busiest stretch."""
        return math.ceil(made.busiest * self.block_bytes / PEAK_S / self.given.link_bytes)

    def in_memory(self, places: int) -> Way:
        room = places * self.block_bytes
        number = max(1, math.ceil(room / self.given.server_memory), self.by_link(self.at(places)))
        memory = _whole_gib(room / number, self.given.server_memory)
        made = self.at(number * memory // self.block_bytes)
        return Way(
            MEMORY, number, memory, 0, made.share, self.saved_s(made),
            number * self._memory_price(memory),
        )  # fmt: skip

    def on_disk(self, places: int) -> Way:
        made, room = self.at(places), places * self.block_bytes
        writes = made.written * self.block_bytes / self.seconds
        number = max(1, math.ceil(writes / self.given.disk_writes), self.by_link(made))
        disk = _whole_gib(room / number)
        memory = _whole_gib(disk / DISK_PART, min(MOST_ABOVE_DISK, self.given.server_memory))
        made = self.at(number * memory // self.block_bytes, disk=number * disk // self.block_bytes)
        writes = made.written * self.block_bytes / self.seconds
        return Way(
            DISK, number, memory, disk, made.share, self.saved_s(made),
            number * (self._memory_price(memory) + disk / GB * self.given.disk_price),
            below=made.from_disk / made.asked, disk_writes=math.ceil(writes / number),
        )  # fmt: skip

    def above_a_bucket(self, places: int) -> Way:
        """With half of the room, or one server's memory if that is less."""
        memory = _whole_gib(places * self.block_bytes / 2, self.given.server_memory)
        made = self.at(memory // self.block_bytes, bucket=True)
        number = max(1, self.by_link(made))
        memory = _whole_gib(memory / number)
        months = MONTH_S / self.seconds
        sweeps = MONTH_S / SWEEP_EVERY_S
        bill = bucket_bill(
            self.given.bucket_prices, puts=made.puts * months, gets=made.gets * months,
            sweeps=number * sweeps,
            byte_months=made.bucket_bytes / self.seconds * BUCKET_DAYS * 86_400,
        )  # fmt: skip
        return Way(
            BUCKET, number, memory, 0, made.share, self.saved_s(made),
            number * self._memory_price(memory) + bill.total,
            below=made.from_bucket / made.asked,
            bucket_requests=(made.puts + made.gets) * months, bill=bill,
            bucket_writes=math.ceil(made.bucket_bytes / self.seconds / number),
        )  # fmt: skip

    def _memory_price(self, memory: int) -> float:
        return memory / GiB * self.given.memory_price


def advise(trace: Trace, given: Given, show: Show) -> Advice:
    """Replays `trace` at every size. Raises `TraceError` for one without blocks or times."""
    if not any(one.blocks for one in trace.requests if not one.is_put):
        raise TraceError(f"no prompt has a whole block of {trace.block_tokens} tokens")
    if trace.requests[-1].arrival_s < LEAST_S:
        raise TraceError(
            "all requests come within a second, so a month of them and the speed of servers are "
            "unknown: the trace needs times, or a longer time"
        )
    study = _Study(_counted(trace), given, show)
    everything = study.everything
    sizes = sorted({max(1, everything >> step) for step in range(HALVINGS + 1)})
    rooms = [study.room(places) for places in sizes]
    places = study.advised()
    advised = study.room(places)
    whole = study.at(everything)
    why_none = _why_none(whole, study)
    ways = () if why_none else (
        study.in_memory(places), study.on_disk(places), study.above_a_bucket(places)
    )  # fmt: skip
    return Advice(
        study.num_prompts, study.seconds, whole.asked * study.trace.block_tokens,
        study.trace.block_tokens, everything * study.block_bytes, whole.share,
        sum(one.input_tokens for one in trace.requests if not one.is_put)
        / study.num_prompts / given.prefill_tokens,
        tuple(rooms), advised, study.at(places).busiest * study.block_bytes / PEAK_S,
        ways, _cheapest(ways, advised.share), why_none,
    )  # fmt: skip


def _counted(trace: Trace) -> Trace:
    """In blocks so large that a replay takes seconds."""
    least = LEAST_KEPT * _tokens(trace)
    while _tokens(trace) > MOST_BLOCKS * trace.block_tokens:
        larger = trace.in_blocks_of(2 * trace.block_tokens)
        if larger.block_tokens > MOST_COUNTED or _tokens(larger) < least:
            break
        trace = larger
    return trace


def _tokens(trace: Trace) -> int:
    """In whole blocks."""
    return trace.block_tokens * sum(len(one.blocks) for one in trace.requests)


def _why_none(whole: Replayed, study: _Study) -> str:
    if whole.share < ENOUGH:
        return (
            f"prompts do not return: with room for everything {100 * whole.share:.1f} % of their "
            "tokens are found"
        )
    if not study.saved_s(whole):
        return (
            "computing a token is faster than loading it over this link: a cache would save nothing"
        )
    return ""


def _cheapest(ways: Sequence[Way], share: float) -> Way | None:
    enough = [way for way in ways if way.share >= share - ENOUGH]
    return min(enough, key=lambda way: way.dollars, default=None)


def _written(num_bytes: int) -> str:
    """As an operator writes it, in whole GiB also above a TiB."""
    gib, rest = divmod(num_bytes, GiB)
    return written_size(num_bytes) if rest else f"{gib}GiB"


def _whole_gib(num_bytes: float, most: int | None = None) -> int:
    """At least as much, in whole GiB; but not more than `most`."""
    whole = max(1, math.ceil(num_bytes / GiB)) * GiB
    return whole if most is None else min(whole, most)
