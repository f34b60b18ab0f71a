"""The disk's format: names of files, headers of segments and blocks."""

import re
import struct
from collections.abc import Container
from itertools import count
from typing import NamedTuple

import xxhash

from remote_server.protocol import MAX_KEY_BYTES, MAX_NAMESPACE_CHARS, UNKNOWN, Stretch
from remote_server.protocol.codec import from_words, to_words
from remote_server.store.pages import PAGE, padded

FORMAT_VERSION = 1

SEGMENT_MAGIC = b"KVFSEGM\n"
SLOT_MAGIC = b"KVFSLOT\n"

ERASED = bytes(PAGE)
"""Overwrites the header of a block that must not be found again."""

# Magic and version come first, in every format, so that any version can recognise another.
_PREFIX = struct.Struct("<8sH")
# …, length of the namespace, (unused), incarnation, segment_bytes, block_bytes, generation
_SEGMENT = struct.Struct("<8sHHIQQQQ")
# …, length of the key, slot, incarnation, length, checksum, generation
_SLOT = struct.Struct("<8sHHIQQQQ")
_CHECKSUM = struct.Struct("<Q")
_BODY = PAGE - _CHECKSUM.size

MOST = 1 << 62
"""No server writes such a size or generation, which is nanoseconds since 1970."""

# Before the checksum of a slot header. Earlier servers wrote zeros there, and ignore it.
_CHAIN = struct.Struct("<QQ")
_CHAIN_AT = _BODY - _CHAIN.size
_PARENT = struct.Struct("<Q")
_PARENT_AT = _CHAIN_AT - _PARENT.size

assert _SEGMENT.size + 4 * MAX_NAMESPACE_CHARS <= _BODY
assert _SLOT.size + MAX_KEY_BYTES <= _PARENT_AT


class SegmentHeader(NamedTuple):
    """The first page of a segment."""

    namespace: str
    block_bytes: int
    segment_bytes: int  # of the whole file
    incarnation: int  # random; a slot's header must repeat it
    generation: int  # when it was made, on the scale of its blocks' generations


class SlotHeader(NamedTuple):
    """The first page of a slot. A higher generation was written later."""

    key: bytes
    length: int
    checksum: int  # `protocol.checksum` of the block's bytes
    generation: int
    chain: Stretch = UNKNOWN
    parent: int = 0  # stands for the row before it in its prompt; 0: not known


def slot_bytes_for(block_bytes: int) -> int:
    """A header page, and room for the block."""
    return PAGE + padded(block_bytes)


def num_slots(segment_bytes: int, block_bytes: int) -> int:
    return (segment_bytes - PAGE) // slot_bytes_for(block_bytes)


def slot_offset(slot: int, slot_bytes: int) -> int:
    """The offset of a slot's header in its segment."""
    return PAGE + slot * slot_bytes


def pack_segment_header(header: SegmentHeader) -> bytes:
    name = header.namespace.encode()
    fields = _SEGMENT.pack(
        SEGMENT_MAGIC, FORMAT_VERSION, len(name), 0, header.incarnation, header.segment_bytes,
        header.block_bytes, header.generation,
    )  # fmt: skip
    return _sealed(fields + name)


def version_of(page: bytes | memoryview) -> int | None:
    """The format version of a segment's first page, or None when it is not a segment at all."""
    magic, version = _PREFIX.unpack_from(page)
    return int(version) if magic == SEGMENT_MAGIC else None


def is_slot_magic(page: bytes | memoryview) -> bool:
    """Whether a page begins with the magic of a slot header."""
    return bytes(page[: len(SLOT_MAGIC)]) == SLOT_MAGIC


def has_damaged_prefix(page: bytes | memoryview) -> bool:
    """Whether a page is a segment's with a damaged magic or version: with these repaired its
    checksum matches."""
    repaired = bytearray(page)
    _PREFIX.pack_into(repaired, 0, SEGMENT_MAGIC, FORMAT_VERSION)
    return _is_sealed(memoryview(repaired))


def unpack_segment_header(page: bytes | memoryview) -> SegmentHeader | None:
    """None when the page is damaged, or has numbers that no server writes. The caller has checked
    the version."""
    if not _is_sealed(page):
        return None
    _, _, name_length, _, incarnation, segment_bytes, block_bytes, generation = (
        _SEGMENT.unpack_from(page)
    )
    try:
        name = bytes(page[_SEGMENT.size : _SEGMENT.size + name_length]).decode()
    except UnicodeDecodeError:
        return None
    if not 0 < len(name) <= MAX_NAMESPACE_CHARS or not block_bytes:
        return None
    if max(block_bytes, segment_bytes, generation) >= MOST:
        return None
    return SegmentHeader(name, block_bytes, segment_bytes, incarnation, generation)


def pack_slot_header(header: SlotHeader, slot: int, incarnation: int) -> bytes:
    fields = _SLOT.pack(
        SLOT_MAGIC, FORMAT_VERSION, len(header.key), slot, incarnation, header.length,
        header.checksum, header.generation,
    )  # fmt: skip
    place = _PARENT.pack(header.parent) + _CHAIN.pack(*to_words(header.chain))
    return _sealed((fields + header.key).ljust(_PARENT_AT, b"\0") + place)


def unpack_slot_header(
    page: bytes | memoryview, slot: int, incarnation: int, block_bytes: int
) -> SlotHeader | None:
    """None unless the page is the intact header of a block in exactly this slot."""
    magic, version, key_length, own_slot, own_incarnation, length, checksum, generation = (
        _SLOT.unpack_from(page)
    )
    here = (SLOT_MAGIC, FORMAT_VERSION, slot, incarnation)
    if (magic, version, own_slot, own_incarnation) != here or not _is_sealed(page):
        return None
    if not 0 < length <= block_bytes or not 0 < key_length <= MAX_KEY_BYTES:
        return None
    key = bytes(page[_SLOT.size : _SLOT.size + key_length])
    words = _CHAIN.unpack_from(page, _CHAIN_AT)
    if max(words) >> 63 or generation >= MOST:
        return None
    chain = from_words(*words)
    (parent,) = _PARENT.unpack_from(page, _PARENT_AT)
    return SlotHeader(key, length, checksum, generation, chain, parent)


def holds_nothing(page: bytes | memoryview) -> bool:
    """Whether a slot's first page was never written, or erased. A page that is neither empty nor an
    intact header is damaged."""
    return page == ERASED


def _sealed(fields: bytes) -> bytes:
    body = fields.ljust(_BODY, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _is_sealed(page: bytes | memoryview) -> bool:
    (checksum,) = _CHECKSUM.unpack_from(page, _BODY)
    return bool(xxhash.xxh3_64_intdigest(memoryview(page)[:_BODY]) == checksum)


README = "README.txt"
README_NEW = "README.txt.new"
LOCK = "LOCK"
OURS = (README, README_NEW, LOCK, "lost+found")  # the last is at the root of a file system

_SEGMENT_NAME = re.compile(r"segment-(\d{8,})(\.new)?")
_ASIDE = re.compile(r"segment-\d{8,}(\.new)?\.damaged(\.\d+)?")


class SegmentName(NamedTuple):
    number: int
    is_unfinished: bool


def segment_name(number: int) -> str:
    return f"segment-{number:08d}"


def new_name(number: int) -> str:
    """The name of a segment until it is complete."""
    return segment_name(number) + ".new"


def parse(name: str) -> SegmentName | None:
    """None unless it is a segment's name, complete or not."""
    match = _SEGMENT_NAME.fullmatch(name)
    return None if match is None else SegmentName(int(match[1]), bool(match[2]))


def aside_name(name: str, taken: Container[str]) -> str:
    """The new name of `name` when it is put aside, because it cannot be read as a segment."""
    wanted = f"{name}.damaged"
    return next(
        free
        for number in count(1)
        if (free := wanted if number == 1 else f"{wanted}.{number}") not in taken
    )


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def is_of_a_segment(name: str) -> bool:
    """Whether it is the name of a segment, or of a file put aside."""
    return parse(name) is not None or is_aside(name)
