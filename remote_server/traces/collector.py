"""Collection of a trace's lines: checks that every format shares, and the problems, counted."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from remote_server.traces.json_lines import decode
from remote_server.traces.text import Lines
from remote_server.traces.trace import Problem, Request, Trace, TraceError, Tree

MAX_TOKENS = 1 << 31
"""Of a prompt or an answer."""

MAX_SECONDS = 1e12

LATE = "earlier than the line before, sorted by time"
NO_PARTIAL = "hash_ids has no id for the last, partial block"

NO_PREFIXES = (
    "Take a trace with hash_ids, as Mooncake's or Qwen-Bailian's, or a recording of your own server"
)
"""The way out for a file without prefixes."""


class Collector:
    """The requests of one file, in the order of their lines."""

    def __init__(
        self, path: Path, name: str, *, starts_anywhere: bool = False, is_tree: bool = False
    ) -> None:
        """`name`: of the format. `is_tree`: its blocks are a tree whatever the file has."""
        self.path = path
        self.assumptions: list[str] = []
        self.block_bytes: int | None = None
        self.recorded_found: int | None = None
        self._name = name
        self._starts_anywhere = starts_anywhere
        self._tree = None if is_tree else Tree(starts_anywhere=starts_anywhere)
        self._requests: list[Request] = []
        self._lines: list[int] = []
        """Their numbers."""
        self._problems: dict[str, Problem] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def refuse(self, number: int, text: str) -> TraceError:
        """The error of a line, to be raised."""
        return TraceError(f"{self.path}, line {number:,}: {text}")

    def problem(self, number: int, text: str) -> None:
        """Count an accepted line."""
        before = self._problems.get(text) or Problem(0, number, text)
        self._problems[text] = before._replace(num_lines=before.num_lines + 1)

    def check(self, number: int, at_s: float, prompt: int, answer: int) -> None:
        """Raises `TraceError` for a time, or a length in tokens, that no request has."""
        if not math.isfinite(at_s) or not 0 <= at_s <= MAX_SECONDS:
            raise self.refuse(number, f"the time {at_s:g} s is no time of a trace")
        for name, tokens in (("a prompt", prompt), ("an answer", answer)):
            if not 0 <= tokens <= MAX_TOKENS:
                raise self.refuse(number, f"{tokens:,} tokens are no length of {name}")

    def add(self, number: int, request: Request) -> None:
        """The request of a line, with all its ids. Raises `TraceError`."""
        self.check(number, request.arrival_s, request.input_tokens, request.output_tokens)
        try:
            if self._tree is not None:
                self._tree.add(request.blocks)
        except ValueError as error:
            raise self.refuse(
                number, f"{error}: equal ids must mean equal prompts up to their block"
            ) from None
        if self._requests and request.arrival_s < self._requests[-1].arrival_s:
            self.problem(number, LATE)
        self._requests.append(request)
        self._lines.append(number)

    def trace(self, block_tokens: int, *, partial_blocks: bool = False) -> Trace:
        """End the collection. An engine caches only full blocks, so a partial last block is omitted
        unless `partial_blocks` keeps it. Raises `TraceError` when there is no request."""
        if all(one.is_put for one in self._requests):
            raise TraceError(f"{self.path}: no requests")
        begin = min(one.arrival_s for one in self._requests)
        made, without = [], []
        has_partial = False
        for number, one in zip(self._lines, self._requests, strict=True):
            full = one.input_tokens // block_tokens
            if len(one.blocks) > full:
                has_partial = True
            elif one.input_tokens % block_tokens:
                without.append(number)
            blocks = one.blocks if partial_blocks else one.blocks[:full]
            made.append(one._replace(arrival_s=one.arrival_s - begin, blocks=blocks))
        if has_partial and without:  # else the format has ids of full blocks only
            self._problems[NO_PARTIAL] = Problem(len(without), without[0], NO_PARTIAL)
        return Trace(
            self._name,
            block_tokens,
            tuple(sorted(made, key=lambda one: one.arrival_s)),
            tuple(self._problems.values()),
            tuple(self.assumptions),
            self.block_bytes,
            self.recorded_found,
            self._starts_anywhere,
        )


class IdLine(msgspec.Struct):
    """The fields that count of a line with an id for each block, Mooncake's or Qwen-Bailian's."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def id_lines(made: Collector, sizes: "BlockSizes", lines: Lines) -> Iterator[tuple[int, IdLine]]:
    """Each line with its number; `sizes` learns from it. Raises `TraceError`."""
    for number, line in lines:
        try:
            one = decode(line, IdLine)
            sizes.add(one.input_length, len(one.hash_ids))
        except ValueError as error:
            raise made.refuse(number, f"{error}") from None
        yield number, one


class BlockSizes:
    """The block sizes that fit every line so far: a prompt has an id for each block, where the last
    one may be partial, or have no id."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes`: in tokens, the likeliest first."""
        self._sizes = list(sizes)

    @property
    def best(self) -> int:
        return self._sizes[0]

    def add(self, input_tokens: int, num_ids: int) -> None:
        """Raises `ValueError` when none fits any more."""
        fit = [size for size in self._sizes if fits(input_tokens, num_ids, size)]
        if not fit:
            size = self._sizes[0]
            raise ValueError(
                f"input_length {input_tokens} is {-(-input_tokens // size)} blocks of {size} "
                f"tokens, hash_ids has {num_ids}"
            )
        self._sizes = fit


def fits(input_tokens: int, num_ids: int, size: int) -> bool:
    """Whether there is an id for each block of `size` tokens, or for each full one."""
    return num_ids in (-(-input_tokens // size), input_tokens // size)
