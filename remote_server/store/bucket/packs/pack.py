"""One pack, its rows as blocks of the tier, and their places in the object."""

from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from remote_server.protocol import Stretch
from remote_server.protocol.codec import from_words, to_words
from remote_server.store.bucket.packs import layout
from remote_server.store.tier import Together


class PackState(Enum):
    WRITING = auto()
    READABLE = auto()
    GONE = auto()  # forgotten, replaced, removed or cleared


class BucketBlock(msgspec.Struct, eq=False):
    """A row of a pack, as a block of the tier."""

    pack: "Pack"
    key: bytes
    length: int
    checksum: int
    chain: Stretch
    offset: int = 0
    """Its first byte in the object."""
    stored: int = 0
    """The bytes that it takes there: fewer than its length where it is compressed."""

    @property
    def namespace(self) -> str:
        return self.pack.namespace

    @property
    def parent(self) -> int:
        """Not known: the rows of a pack are in the bucket already."""
        return 0

    @property
    def block_bytes(self) -> int:
        return self.pack.block_bytes


class Pack(msgspec.Struct, eq=False):
    """One object of the bucket."""

    namespace: str
    key: bytes
    """That of its last row, which names it."""
    block_bytes: int
    modified: float
    """When it was written, in seconds since 1970, by the clock of the store."""
    state: PackState
    seal: int = 0
    """The checksum of its header, which no other pack has: not even one of the same name."""
    codec: str = ""
    element_bytes: int = 1
    rows: list[BucketBlock] = []
    pins: int = 0
    is_cleared: bool = False

    @property
    def num_bytes(self) -> int:
        last = self.rows[-1]
        return last.offset + last.stored


def make_pack(
    header: layout.PackHeader,
    modified: float,
    state: PackState,
    start: bytes | memoryview | None = None,
) -> Pack:
    """The pack that `header` describes; `start` as for `set_places`."""
    pack = Pack(header.namespace, header.rows[-1].key, header.block_bytes, modified, state)
    pack.rows = [
        BucketBlock(pack, row.key, row.length, row.checksum, from_words(row.place, row.request))
        for row in header.rows
    ]
    set_places(pack, header, start)
    return pack


def set_places(
    pack: Pack, header: layout.PackHeader, start: bytes | memoryview | None = None
) -> None:
    """Where the rows of `pack` are in the object that begins with `start`, or else with `header` as
    this server writes it: another one may write more fields."""
    start = layout.encode_header(header) if start is None else start
    pack.seal = layout.seal_of(start)
    pack.codec, pack.element_bytes = header.codec, header.element_bytes
    offsets = layout.offsets_of(header, layout.header_bytes_of(start))
    for row, offset, stored in zip(pack.rows, offsets, header.stored_lengths, strict=True):
        row.offset, row.stored = offset, stored


def header_of(
    namespace: str,
    block_bytes: int,
    keys: Sequence[bytes],
    lengths: Sequence[int],
    checksums: Sequence[int],
    chain: Sequence[Stretch],
) -> layout.PackHeader:
    """The header of a pack with these rows; `chain` has one stretch for each."""
    rows = [
        layout.RowHeader(key, length, checksum, *to_words(stretch))
        for key, length, checksum, stretch in zip(keys, lengths, checksums, chain, strict=True)
    ]
    return layout.PackHeader(namespace, block_bytes, rows)


def by_pack(blocks: Sequence[BucketBlock]) -> list[Together[BucketBlock]]:
    """`blocks` by their packs, with the other rows of each, which are pinned with them."""
    wanted: dict[Pack, list[BucketBlock]] = {}
    for block in blocks:
        wanted.setdefault(block.pack, []).append(block)
    together = []
    for pack, rows in wanted.items():
        chosen = {*rows}
        more = [row for row in pack.rows if row not in chosen]
        pack.pins += len(more)
        together.append(Together(rows, more))
    return together
