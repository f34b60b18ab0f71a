"""The format of a pack: one object, a header of whole pages, then the rows on page boundaries.

Nothing of it is trusted before its checksum. The header names every row and has its checksum; rows
have the checksums that they have in memory and on disk, which bind them to their keys.

There are two formats. A plain pack (1) has the bytes of its rows. A compressed pack (2) names its
codec, and has for each row the length that it takes in the object: the row's own where it is not
compressed. Each row is compressed by itself. Its checksum is that of its bytes before that.
"""

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from remote_server.protocol import MAX_KEY_BYTES, MAX_NAMESPACE_CHARS
from remote_server.store.bucket.packs.grouping import MAX_ROWS
from remote_server.store.pages import PAGE, padded

PLAIN, COMPRESSED = 1, 2
MAGIC = b"KVFPACK\n"

HEADER_READ_BYTES = 4 * PAGE
"""A read of a header asks for this much: 64 rows with keys of vLLM take two pages."""

MAX_HEADER_BYTES = 1 << 20

# magic, version, unused, length of the header in bytes, length of its fields, checksum of both
# numbers and the fields
_PREFIX = struct.Struct("<8sHHIIQ")
START_BYTES = _PREFIX.size
"""`header_bytes_of` and `seal_of` read no more."""

_SEALED = struct.Struct("<II")
_SEALED_COMPRESSED = struct.Struct("<HII")

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RowHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One row of a pack."""

    key: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
    length: Annotated[int, Meta(ge=0, lt=1 << 32)]
    checksum: Annotated[int, Meta(ge=0)]
    place: _Natural  # the two words of its chain fields
    request: _Natural


class PackHeader(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a pack's header. The last row's key names the pack.

    A plain pack has the first three.
    """

    namespace: Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 32)]
    rows: Annotated[list[RowHeader], Meta(min_length=1, max_length=MAX_ROWS)]
    codec: Annotated[str, Meta(max_length=32)] = ""
    """The name of an entry of `codecs`; empty in a plain pack."""
    element_bytes: Annotated[int, Meta(ge=1, le=16)] = 1
    """The size of the numbers in the rows, for the codec."""
    stored: list[_Natural] = []
    """The bytes that each row takes in the object, in a compressed pack."""

    @property
    def stored_lengths(self) -> list[int]:
        """The bytes that each row takes in the object."""
        return self.stored or [row.length for row in self.rows]


class PackDamaged(Exception):
    """An object that is not the pack that its name promises. The text is the reason."""


class PackForeign(Exception):
    """A pack that another server wrote, and that this one cannot read. The text is the reason."""

    def __init__(self, counter: str, words: str) -> None:
        super().__init__(words)
        self.counter = counter
        """The counter of its kind."""


def encode_header(header: PackHeader) -> bytes:
    """The pages before the rows."""
    version = COMPRESSED if header.codec else PLAIN
    plain = header.namespace, header.block_bytes, header.rows
    fields = msgspec.msgpack.encode(header if header.codec else plain)
    num_bytes = padded(_PREFIX.size + len(fields))
    checksum = _checksum(version, num_bytes, fields)
    prefix = _PREFIX.pack(MAGIC, version, 0, num_bytes, len(fields), checksum)
    return (prefix + fields).ljust(num_bytes, b"\0")


def header_bytes_of(data: bytes | memoryview) -> int:
    """The length of the header that `data` begins with. Raises `PackDamaged`, or `PackForeign` for
    another format: of a later server, or an earlier one."""
    if len(data) < _PREFIX.size:
        raise PackDamaged(f"{len(data)} bytes, shorter than any header")
    magic, version, _, num_bytes, num_fields, _ = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise PackDamaged("not a pack")
    if version not in (PLAIN, COMPRESSED):
        raise PackForeign("headers_version", f"a pack of format {version}")
    if num_bytes > MAX_HEADER_BYTES or num_bytes != padded(_PREFIX.size + num_fields):
        raise PackDamaged(f"a header of {num_bytes} bytes")
    return int(num_bytes)


def decode_header(data: bytes | memoryview, namespace: str, key: bytes) -> PackHeader:
    """The header that `data` begins with, of the pack of `key`. Raises `PackDamaged`
    or `PackForeign`."""
    num_bytes = header_bytes_of(data)
    if len(data) < num_bytes:
        raise PackDamaged(f"{len(data)} of {num_bytes} bytes of its header")
    _, version, _, _, num_fields, checksum = _PREFIX.unpack_from(data)
    fields = bytes(data[_PREFIX.size : _PREFIX.size + num_fields])
    if _checksum(version, num_bytes, fields) != checksum:
        raise PackDamaged("the checksum of its header is wrong")
    try:
        header = msgspec.msgpack.decode(fields, type=PackHeader)
    except msgspec.DecodeError as error:
        raise PackDamaged(f"its header is unreadable: {error}") from error
    if header.namespace != namespace or header.rows[-1].key != key:
        raise PackDamaged("it is not the pack of its name")
    _check_rows(header)
    if version == PLAIN:
        return PackHeader(header.namespace, header.block_bytes, header.rows)
    _check_compressed(header)
    return header


def _check_rows(header: PackHeader) -> None:
    if len({row.key for row in header.rows}) < len(header.rows):
        raise PackDamaged("its header names a key twice")
    if max(row.length for row in header.rows) > header.block_bytes:
        raise PackDamaged("a row of it is longer than a block")


def _check_compressed(header: PackHeader) -> None:
    if not header.codec or len(header.stored) != len(header.rows):
        raise PackDamaged("its header has no codec, or not the length of each row")
    if any(
        not 0 < stored <= row.length <= header.block_bytes
        for row, stored in zip(header.rows, header.stored, strict=True)
        if row.length or stored
    ):
        raise PackDamaged("a row of it is longer compressed than it is, or than a block")


def seal_of(data: bytes | memoryview) -> int:
    """The checksum in the header that `data` begins with: two packs with the same have the same
    header."""
    *_, checksum = _PREFIX.unpack_from(data)
    return int(checksum)


def offsets_of(header: PackHeader, header_bytes: int) -> Iterator[int]:
    """Where each row begins in the object, behind the `header_bytes` of its encoded header."""
    for stored in header.stored_lengths:
        yield header_bytes
        header_bytes += padded(stored)


def _checksum(version: int, num_bytes: int, fields: bytes) -> int:
    lengths = num_bytes, len(fields)
    # The first format's checksum is without its number.
    sealed = (
        _SEALED.pack(*lengths) if version == PLAIN else _SEALED_COMPRESSED.pack(version, *lengths)
    )
    return xxhash.xxh3_64_intdigest(sealed + fields)
