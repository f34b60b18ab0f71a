"""A trace: requests in the order of their times, and the problems of the file they come from.

A prompt is a path in a tree of blocks: equal ids mean equal prompts from the first token to the end
of that block.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from remote_server.errors import ConfigError


class TraceError(ConfigError):
    """A file that is no trace, or one whose meaning is not clear. The message names the file, the
    line where there is one, the defect, and a way out."""


class Request(NamedTuple):
    """One prompt that arrived, or blocks that were stored without one."""

    arrival_s: float
    """Seconds since the trace began."""

    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the prompt's blocks, from its first token on."""

    is_put: bool = False
    """Blocks that no lookup asked for, such as those of an answer: a replay stores them, and counts
    neither them nor what of them it finds."""


class Problem(NamedTuple):
    """Lines that were accepted although something is wrong with them."""

    num_lines: int
    first_line: int
    text: str

    def __str__(self) -> str:
        lines = "line" if self.num_lines == 1 else "lines"
        return f"{self.num_lines:,} {lines}: {self.text} (the first: line {self.first_line:,})"


@dataclass(frozen=True)
class Trace:
    """The requests of one file."""

    format: str
    """Its name, for people."""

    block_tokens: int
    """Tokens of a block."""

    requests: tuple[Request, ...]
    """In the order of their times. The first has the time 0."""

    problems: tuple[Problem, ...] = ()

    assumptions: tuple[str, ...] = ()
    """Sentences about what the file does not contain."""

    block_bytes: int | None = None
    """Bytes of a block where the file names them."""

    recorded_found: int | None = None
    """Blocks that the cache found when the trace was recorded, where the file names them."""

    starts_anywhere: bool = False
    """Whether a request's first block may be in the middle of a prompt: a lookup names only what
    the levels above the server lack."""

    def starts(self) -> list[int]:
        """How many blocks of its prompt are before the first one of each request, as far as other
        requests show it."""
        if not self.starts_anywhere:
            return [0] * len(self.requests)
        parent_of: dict[int, int | None] = {}
        for one in self.requests:
            for before, after in itertools.pairwise(one.blocks):
                parent_of[after] = before
        place_of: dict[int, int] = {}
        for one in self.requests:
            above: dict[int, None] = {}
            block = one.blocks[0] if one.blocks else None
            while block is not None and block not in place_of and block not in above:
                above[block] = None
                block = parent_of.get(block)
            place = -1 if block is None else place_of.get(block, -1)  # -1 where ids form a ring
            place_of.update((each, place + at) for at, each in enumerate(reversed(above), 1))
        return [place_of[one.blocks[0]] if one.blocks else 0 for one in self.requests]

    def in_blocks_of(self, tokens: int) -> "Trace":
        """The same prompts in larger blocks, of which only full ones are kept. A request has a
        block where it has the last part of it. Raises `TraceError` for a size that is no
        multiple."""
        step, rest = divmod(tokens, self.block_tokens)
        if step == 1 and not rest:
            return self
        if rest:
            raise TraceError(
                f"{self.format}: blocks of {self.block_tokens} tokens are not blocks of {tokens}"
            )
        made = []
        for one, start in zip(self.requests, self.starts(), strict=True):
            full = one.blocks[: one.input_tokens // self.block_tokens]
            made.append(one._replace(blocks=full[step - 1 - start % step :: step]))
        block_bytes = None if self.block_bytes is None else step * self.block_bytes
        return replace(self, block_tokens=tokens, requests=tuple(made), block_bytes=block_bytes)


class Tree:
    """The predecessor of each block."""

    def __init__(self, *, starts_anywhere: bool = False) -> None:
        """`starts_anywhere`: the predecessor of a request's first block is unknown."""
        self._starts_anywhere = starts_anywhere
        self._parent_of: dict[int, int | None] = {}

    def add(self, blocks: Sequence[int]) -> None:
        """Raises `ValueError` when a block has two different predecessors, or comes twice in a
        prompt: then its id does not mean an equal prefix, and hit rates have no meaning."""
        parent: int | None = None
        for place, block in enumerate(blocks):
            if place or not self._starts_anywhere:
                known = self._parent_of.setdefault(block, parent)
                if known != parent:
                    raise ValueError(f"block {block} follows {known} and also {parent}")
            parent = block
        if len({*blocks}) < len(blocks):  # in a ring
            twice, times = Counter(blocks).most_common(1)[0]
            raise ValueError(f"block {twice} comes {times:,} times in a prompt")


def check_tree(requests: Iterable[Request]) -> None:
    """Raise `ValueError` where the blocks of `requests` are no tree."""
    tree = Tree()
    for request in requests:
        tree.add(request.blocks)


def longest(requests: Sequence[Request]) -> int:
    """Blocks of the longest prompt."""
    return max(len(request.blocks) for request in requests)


def distinct(requests: Iterable[Request]) -> int:
    """Different blocks: the final size of an unlimited cache."""
    return len({block for request in requests for block in request.blocks})
