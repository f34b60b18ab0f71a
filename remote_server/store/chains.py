"""Chain fields of many rows: stretches that continue each other, and groups of keys."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from remote_server.protocol import UNKNOWN, Stretch


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


def joined(chain: Sequence[Stretch]) -> Iterator[Stretch]:
    """`chain` with stretches that continue each other as one: stored rows have one each."""
    last: Stretch | None = None
    for stretch in chain:
        if last is not None and continues(last, stretch):
            last = msgspec.structs.replace(last, rows=last.rows + stretch.rows)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last


def continues(last: Stretch, stretch: Stretch) -> bool:
    """Whether `stretch` begins where `last` ends."""
    return (
        not last.backwards
        and not stretch.backwards
        and (last.group, last.window) == (stretch.group, stretch.window)
        and last.tokens == stretch.tokens > 0
        and last.start + last.rows * last.tokens == stretch.start
    )


def row_id(key: bytes) -> int:
    """64 bits that stand for a row as the one before another; never 0."""
    return xxhash.xxh3_64_intdigest(key) or 1
