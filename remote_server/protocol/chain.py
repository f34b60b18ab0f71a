"""Chain fields: the place of each block in its prompt, and the class of the request behind it.

Blocks of a prompt form a chain for each KV cache group: a block's key names all tokens before its
end. A message describes its keys in stretches, so that a thousand neighbours cost as much as one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from remote_server.errors import RequestRefused
from remote_server.protocol.limits import MAX_KEYS_PER_MESSAGE, ErrorCode

MAX_TOKENS = (1 << 31) - 1
"""Limit of a position in a prompt."""

MAX_GROUPS = 1 << 16

# A prompt has one stretch for each group. Checking as many as this takes half a millisecond.
MAX_STRETCHES = 1024

_LOW = (1 << 32) - 1

Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class Stretch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive keys of one message, with neighbouring blocks of one group.

    The first block holds the `tokens` tokens from `start` on. Each further block begins where the
    one before it ends, or `backwards` ends where the one before it begins. `known` is the class of
    the request: how many tokens of its prompt were found in any level, 0 for a first turn, -1 when
    that is not known. A stretch of one block without tokens is `UNKNOWN`.
    """

    rows: Annotated[int, Meta(ge=1, le=MAX_KEYS_PER_MESSAGE)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    start: Tokens
    tokens: Tokens
    known: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    backwards: bool = False

    @property
    def end(self) -> int:
        """The end of the first block, in tokens."""
        return self.start + self.tokens

    @property
    def step(self) -> int:
        return -self.tokens if self.backwards else self.tokens

    @property
    def lowest(self) -> int:
        """The start of the block that is nearest to the beginning of the prompt."""
        return min(self.start, self.start + (self.rows - 1) * self.step)

    def part(self, first: int, rows: int) -> "Stretch":
        """`rows` of its blocks, from number `first` on."""
        if rows == self.rows:
            return self
        start = self.start + first * self.step
        return Stretch(rows, self.group, start, self.tokens, self.known, self.backwards)


UNKNOWN = Stretch(1, 0, 0, 0)
"""A block whose sender sent no chain fields."""

Chain = Annotated[list[Stretch], Meta(max_length=MAX_STRETCHES)]
"""The stretches of all keys of a message, in their order; empty when the fields are not known."""


def check_chain(chain: Sequence[Stretch], num_keys: int) -> None:
    """Raise `RequestRefused` unless `chain` is empty or describes exactly `num_keys` blocks within
    the limits."""
    num_rows = 0
    for stretch in chain:
        rows, tokens, lowest = stretch.rows, stretch.tokens, stretch.start
        if stretch.backwards:
            lowest -= (rows - 1) * tokens
        num_rows += rows
        if not tokens:
            _refuse(f"a block that begins and ends at token {stretch.start}")
        if lowest < 0:
            _refuse(f"a stretch that begins {-lowest} tokens before token 0")
        if lowest + rows * tokens > MAX_TOKENS:
            _refuse(f"a stretch that ends behind token {MAX_TOKENS}")
    if num_rows != num_keys and chain:
        _refuse(f"{num_rows} blocks in {len(chain)} stretches, and {num_keys} keys")


def _refuse(reason: str) -> None:
    raise RequestRefused(ErrorCode.BAD_REQUEST, f"chain: {reason}")


def select(chain: Sequence[Stretch], indices: Sequence[int]) -> list[Stretch]:
    """The stretches of the keys at `indices`, which ascend; empty when `chain` is."""
    if len(chain) == 1 and len(indices) == chain[0].rows:
        return [*chain]
    selected: list[Stretch] = []
    first = 0
    for stretch in chain:
        begin = bisect_left(indices, first)
        here = indices[begin : bisect_left(indices, first + stretch.rows, begin)]
        if here and here[-1] - here[0] == len(here) - 1:
            selected.append(stretch.part(here[0] - first, len(here)))
        else:
            selected += [stretch.part(index - first, 1) for index in here]
        first += stretch.rows
    return selected


def to_words(block: Stretch) -> tuple[int, int]:
    """The fields of one block as two words of 63 bits; two zeros for `UNKNOWN`."""
    return block.start << 32 | block.end, (block.known + 1) << 32 | block.group


def from_words(place: int, request: int) -> Stretch:
    """The inverse of `to_words`."""
    start, end = place >> 32, place & _LOW
    if start >= end:
        return UNKNOWN
    return Stretch(1, request & _LOW, start, end - start, (request >> 32) - 1)


_NUMBERS = np.arange(MAX_KEYS_PER_MESSAGE)


class ChainTable:
    """The chain fields of the blocks in a number of slots: 16 bytes a slot, none before the first
    block whose fields are known."""

    __slots__ = ("_words",)

    def __init__(self) -> None:
        self._words: npt.NDArray[np.int64] | None = None

    def __getitem__(self, slot: int) -> Stretch:
        return UNKNOWN if self._words is None else from_words(*self._words[slot].tolist())

    def set(self, slots: Sequence[int], num_slots: int, chain: Sequence[Stretch]) -> None:
        """`chain` has the fields of the new blocks in `slots`, of `num_slots` in all; they are
        unknown when it is empty."""
        words = self._words
        if words is None:
            if not any(stretch.tokens for stretch in chain):
                return
            words = self._words = np.zeros((num_slots, 2), np.int64)
        if not chain:
            words[list(slots)] = 0
            return
        first = 0
        for stretch in chain:
            place, request = to_words(stretch)
            slot, rows = slots[first], stretch.rows
            if rows == 1:
                words[slot, 0], words[slot, 1] = place, request
            else:
                some = slots[first : first + rows]
                # Neighbours mostly, and then a slice takes a third of the time.
                here = slice(slot, slot + rows) if some == [*range(slot, slot + rows)] else some
                step = (stretch.step << 32) + stretch.step
                words[here, 0] = _NUMBERS[:rows] * step + place
                words[here, 1] = request
            first += rows
