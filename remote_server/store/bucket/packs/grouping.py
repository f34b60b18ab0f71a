"""Packs: which rows of a prompt form one object of the bucket, and the object's name.

A pack holds all rows of one aligned stretch of a chain, a power of two of them. Keys are chained:
a row's key names all tokens before its end. So the key of a pack's last row names all its rows,
and servers that never met choose the same name for the same tokens.

Of a group with a window a hit loads the last rows alone, and an engine keeps few others. There a
pack has only those rows of its stretch that a hit up to its end loads. Where that is one row, a
recurrent state, engines keep it at any place: each is a pack of its own.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from remote_server.protocol import UNKNOWN, Stretch

MAX_PACK_TOKENS = 1024
"""A run of the fleet's placement begins at a multiple of this: no pack crosses two runs."""

MAX_ROWS = 1024
"""Limit of the rows of a pack: one token each."""

ROOT = "v1"

PARTITIONS = 256

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@+")
_ESCAPED = re.compile("=([0-9A-F]{2})")


class Group(NamedTuple):
    """Keys of one message that form a pack, in the order of their tokens."""

    places: range
    """Their indices in the message: descending where it runs backwards."""
    keys: list[bytes]
    fields: Stretch = UNKNOWN
    """Its chain fields, in the order of their tokens."""

    @property
    def end(self) -> int:
        """The end of its last row, in tokens."""
        return self.fields.start + self.fields.rows * self.fields.tokens

    @property
    def name(self) -> bytes:
        """The key that names the pack."""
        return self.keys[-1]


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


def joined(chain: Sequence[Stretch]) -> Iterator[Stretch]:
    """`chain` with stretches that continue each other as one: stored rows have one each."""
    last: Stretch | None = None
    for stretch in chain:
        if last is not None and _continues(last, stretch):
            last = msgspec.structs.replace(last, rows=last.rows + stretch.rows)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last


def _continues(last: Stretch, stretch: Stretch) -> bool:
    return (
        not last.backwards
        and not stretch.backwards
        and (last.group, last.window) == (stretch.group, stretch.window)
        and last.tokens == stretch.tokens > 0
        and last.start + last.rows * last.tokens == stretch.start
    )


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


def pack_id(namespace: str, key: bytes) -> int:
    """64 bits that stand for a pack's name, where a set of all names is kept. The first eight are
    its partition."""
    name = xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(namespace.encode()))
    return _partition(key) << 56 | name >> 8


def ids_in(partitions: range) -> tuple[int, int]:
    """The lowest and the highest `pack_id` in `partitions`, which are neighbours."""
    return partitions[0] << 56, (partitions[-1] + 1 << 56) - 1


def row_id(key: bytes) -> int:
    """64 bits that stand for a row as the one before another; never 0."""
    return xxhash.xxh3_64_intdigest(key) or 1


def tenant_prefix(tenant: str) -> str:
    """The folder of all objects of `tenant`, which is empty without tenants."""
    return f"{ROOT}/{escaped(tenant)}"


def namespace_prefix(tenant: str, namespace: str) -> str:
    """The folder of all packs of one namespace."""
    return f"{tenant_prefix(tenant)}/{escaped(namespace)}"


def partition_of(key: bytes) -> str:
    """Two hexadecimal digits: object stores limit requests for each prefix."""
    return f"{_partition(key):02x}"


def _partition(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) % PARTITIONS


def object_name(tenant: str, namespace: str, key: bytes) -> str:
    """The name of the pack whose last row has `key`."""
    return f"{namespace_prefix(tenant, namespace)}/{partition_of(key)}/{key.hex()}"


class Named(NamedTuple):
    """What the name of an object means."""

    tenant: str
    namespace: str
    key: bytes


def parse_name(name: str) -> Named | None:
    """The inverse of `object_name`; None for an object that is not a pack."""
    parts = name.split("/")
    if len(parts) != 5 or parts[0] != ROOT:
        return None
    try:
        named = Named(unescaped(parts[1]), unescaped(parts[2]), bytes.fromhex(parts[4]))
    except ValueError:
        return None
    return named if object_name(*named) == name else None


def escaped(text: str) -> str:
    """`text` as one part of an object's name, in characters that no store changes."""
    if not text or text.strip(".") == "":
        return "=" + "".join(f"={byte:02X}" for byte in text.encode())
    return "".join(
        each if each in _PLAIN else "".join(f"={byte:02X}" for byte in each.encode())
        for each in text
    )


def unescaped(part: str) -> str:
    """The inverse of `escaped`. Raises `ValueError`."""
    if part.startswith("="):
        part = part[1:] if part == "=" or part.startswith("==") else part
    found = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), part)
    return found.encode("latin-1").decode()
