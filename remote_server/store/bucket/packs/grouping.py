"""Packs: which rows of a prompt form one object of the bucket, and the object's name.

A pack holds all rows of one aligned stretch of a chain, a power of two of them. Keys are chained:
a row's key names all tokens before its end. So the key of a pack's last row names all its rows,
and servers that never met choose the same name for the same tokens.

Of a group with a window a hit loads the last rows alone, and an engine keeps few others. There a
pack has only those rows of its stretch that a hit up to its end loads. Where that is one row, a
recurrent state, engines keep it at any place: each is a pack of its own.
"""

import itertools
from collections.abc import Iterator, Sequence

import msgspec

from remote_server.protocol import Stretch
from remote_server.store.chains import Group, joined

MAX_PACK_TOKENS = 1024
"""A run of the fleet's placement begins at a multiple of this: no pack crosses two runs."""

MAX_ROWS = 1024
"""Limit of the rows of a pack: one token each."""


def rows_per_pack(tokens: int, row_bytes: int, pack_bytes: int) -> int:
    """How many rows of `tokens` tokens and `row_bytes` bytes form a pack.

    The largest power of two within `MAX_PACK_TOKENS` and `pack_bytes` that divides a run; 1 where
    rows do not divide it.
    """
    rows = 1
    while (
        2 * rows * tokens <= MAX_PACK_TOKENS
        and 2 * rows * row_bytes <= pack_bytes
        and MAX_PACK_TOKENS % (2 * rows * tokens) == 0
    ):
        rows *= 2
    return rows


def packs_in(
    keys: Sequence[bytes],
    chain: Sequence[Stretch],
    row_bytes: int,
    pack_bytes: int,
    *,
    with_tails: bool = False,
) -> Iterator[Group]:
    """The packs all of whose rows are in `keys`, which have the chain fields `chain`.

    A row without chain fields is a pack of its own. The rows of a tail, and those before a window,
    are in no pack; `with_tails` they too are packs of their own.
    """
    by_stretch = packs_by_stretch(keys, chain, row_bytes, pack_bytes, with_tails=with_tails)
    return itertools.chain.from_iterable(by_stretch)


def packs_by_stretch(
    keys: Sequence[bytes],
    chain: Sequence[Stretch],
    row_bytes: int,
    pack_bytes: int,
    *,
    with_tails: bool = False,
) -> Iterator[Iterator[Group]]:
    """The same for each stretch, and at the end for the rows without one."""
    begin = 0
    for stretch in joined(chain):
        yield _packs_of(stretch, keys, begin, row_bytes, pack_bytes, with_tails=with_tails)
        begin += stretch.rows
    yield _singles(keys, begin, len(keys))


def _packs_of(
    stretch: Stretch, keys: Sequence[bytes], begin: int, row_bytes: int, pack_bytes: int,
    *, with_tails: bool,
) -> Iterator[Group]:  # fmt: skip
    first = begin
    for places in _aligned(begin, stretch, row_bytes, pack_bytes):
        if with_tails:
            yield from _singles(keys, first, min(places))
        start = stretch.start + (places[0] - begin) * stretch.step
        fields = msgspec.structs.replace(stretch, rows=len(places), start=start, backwards=False)
        yield Group(places, [keys[place] for place in places], fields)
        first = max(places) + 1
    if with_tails or not stretch.tokens:
        yield from _singles(keys, first, begin + stretch.rows)


def begun_before(
    keys: Sequence[bytes], chain: Sequence[Stretch], row_bytes: int, pack_bytes: int
) -> Iterator[Group]:
    """The packs of which `keys` have the last row, and not the first: an engine that has the
    beginning of a prompt looks up the rest. The rows of each that are in `keys`."""
    begin = 0
    for stretch in joined(chain):
        number, rest = divmod(stretch.start, stretch.tokens) if stretch.tokens else (0, 1)
        if not rest and not stretch.backwards:
            step, rows = _step_and_rows(stretch, row_bytes, pack_bytes)
            count = -number % step  # to the end of the pack that the first row is in
            if 0 < count < rows and count <= stretch.rows:
                places = range(begin, begin + count)
                fields = msgspec.structs.replace(stretch, rows=count)
                yield Group(places, [keys[place] for place in places], fields)
        begin += stretch.rows


def place_in_pack(fields: Stretch, row_bytes: int, pack_bytes: int) -> tuple[int, int]:
    """The place of a row with these chain fields in its pack, and how many rows that has. The place
    is negative for a row that is in none."""
    if not fields.tokens:
        return 0, 1
    number, rest = divmod(fields.start, fields.tokens)
    step, rows = _step_and_rows(fields, row_bytes, pack_bytes)
    return (-1 if rest else number % step - (step - rows)), rows


def _step_and_rows(stretch: Stretch, row_bytes: int, pack_bytes: int) -> tuple[int, int]:
    """A pack has the last so many rows of each so many."""
    step = rows_per_pack(stretch.tokens, row_bytes, pack_bytes) if stretch.window != 1 else 1
    return step, min(stretch.window or step, step)


def _aligned(begin: int, stretch: Stretch, row_bytes: int, pack_bytes: int) -> Iterator[range]:
    """The places of the rows of each whole pack of `stretch`, which begins at `begin`."""
    if not stretch.tokens:
        return
    number, rest = divmod(stretch.start, stretch.tokens)
    if rest:
        return
    step, rows = _step_and_rows(stretch, row_bytes, pack_bytes)
    end = begin + stretch.rows
    if stretch.backwards:
        for first in range(begin + (number + 1) % step, end - rows + 1, step):
            yield range(first + rows - 1, first - 1, -1)
    else:
        for first in range(begin + (step - rows - number) % step, end - rows + 1, step):
            yield range(first, first + rows)


def _singles(keys: Sequence[bytes], begin: int, end: int) -> Iterator[Group]:
    return (Group(range(place, place + 1), [keys[place]]) for place in range(begin, end))
