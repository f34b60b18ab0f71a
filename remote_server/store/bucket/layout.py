"""The format of a pack: one object, a header of whole pages, then the rows on page boundaries.

Nothing of it is trusted before its checksum. The header names every row and has its checksum; rows
have the checksums that they have in memory and on disk, which bind them to their keys.
"""

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from remote_server.protocol import MAX_KEY_BYTES, MAX_NAMESPACE_CHARS
from remote_server.store.bucket.packs import MAX_ROWS
from remote_server.store.disk.layout import PAGE, padded

FORMAT_VERSION = 1
MAGIC = b"KVFPACK\n"

HEADER_READ_BYTES = 4 * PAGE
"""A read of a header asks for this much: 64 rows with keys of vLLM take two pages."""

MAX_HEADER_BYTES = 1 << 20

# magic, version, unused, length of the header in bytes, length of its fields, checksum of both
# numbers and the fields
_PREFIX = struct.Struct("<8sHHIIQ")
_SEALED = struct.Struct("<II")

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RowHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One row of a pack."""

    key: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
    length: Annotated[int, Meta(ge=0, lt=1 << 32)]
    checksum: Annotated[int, Meta(ge=0)]
    place: _Natural  # the two words of its chain fields
    request: _Natural


class PackHeader(msgspec.Struct, array_like=True, frozen=True):
    """The fields of a pack's header. The last row's key names the pack."""

    namespace: Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_CHARS)]
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 32)]
    rows: Annotated[list[RowHeader], Meta(min_length=1, max_length=MAX_ROWS)]


class PackDamaged(Exception):
    """An object that is not the pack that its name promises. The text is the reason."""


def encode_header(header: PackHeader) -> bytes:
    """The pages before the rows."""
    fields = msgspec.msgpack.encode(header)
    num_bytes = padded(_PREFIX.size + len(fields))
    checksum = _checksum(num_bytes, fields)
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, 0, num_bytes, len(fields), checksum)
    return (prefix + fields).ljust(num_bytes, b"\0")


def header_bytes_of(data: bytes | memoryview) -> int:
    """The length of the header that `data` begins with. Raises `PackDamaged`."""
    if len(data) < _PREFIX.size:
        raise PackDamaged(f"{len(data)} bytes, shorter than any header")
    magic, version, _, num_bytes, num_fields, _ = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise PackDamaged("not a pack")
    if version != FORMAT_VERSION:
        raise PackDamaged(f"a pack of format {version}, not {FORMAT_VERSION}")
    if num_bytes > MAX_HEADER_BYTES or num_bytes != padded(_PREFIX.size + num_fields):
        raise PackDamaged(f"a header of {num_bytes} bytes")
    return int(num_bytes)


def decode_header(data: bytes | memoryview, namespace: str, key: bytes) -> PackHeader:
    """The header that `data` begins with, of the pack of `key`. Raises `PackDamaged`."""
    num_bytes = header_bytes_of(data)
    if len(data) < num_bytes:
        raise PackDamaged(f"{len(data)} of {num_bytes} bytes of its header")
    *_, num_fields, checksum = _PREFIX.unpack_from(data)
    fields = bytes(data[_PREFIX.size : _PREFIX.size + num_fields])
    if _checksum(num_bytes, fields) != checksum:
        raise PackDamaged("the checksum of its header is wrong")
    try:
        header = msgspec.msgpack.decode(fields, type=PackHeader)
    except msgspec.DecodeError as error:
        raise PackDamaged(f"its header is unreadable: {error}") from error
    if header.namespace != namespace or header.rows[-1].key != key:
        raise PackDamaged("it is not the pack of its name")
    return header


def offsets_of(header: PackHeader, header_bytes: int) -> Iterator[int]:
    """Where each row begins in the object, behind the `header_bytes` of its encoded header."""
    for row in header.rows:
        yield header_bytes
        header_bytes += padded(row.length)


def _checksum(num_bytes: int, fields: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_SEALED.pack(num_bytes, len(fields)) + fields)
