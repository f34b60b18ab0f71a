"""Work of the bucket's threads: packs are put together and written, headers and rows are read."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from remote_server import protocol
from remote_server.store.bucket.objects.objects import BucketError, Failure, Head, Objects
from remote_server.store.bucket.objects.room import Room
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.codecs import (
    NONE,
    Codec,
    CodecError,
    codec_named,
    element_bytes_of,
)
from remote_server.store.bucket.packs.pack import BucketBlock
from remote_server.store.pages import padded


class ReadHeader(NamedTuple):
    """A header that was read, or why it was not."""

    header: layout.PackHeader | None
    modified: float = 0.0
    failure: Failure | None = None
    damage: str = ""
    foreign: str = ""
    """The counter of a pack that only other servers can read."""
    start: bytes = b""
    """The first bytes of the object, for the places of its rows."""


class Largest(NamedTuple):
    """What this server can hold."""

    block_bytes: int
    pack_bytes: int
    """Of all rows of a pack, before compression; a pack of one row may have more."""

    def check(self, header: layout.PackHeader) -> None:
        """Raise `PackForeign` for the header of a server that can hold more."""
        rows, block_bytes = len(header.rows), header.block_bytes
        if block_bytes > self.block_bytes or (rows > 1 and rows * block_bytes > self.pack_bytes):
            raise layout.PackForeign("headers_too_large", f"{rows} rows of {block_bytes} bytes")


class Want(NamedTuple):
    """A row that a reader waits for. The view is as long as the row."""

    block: BucketBlock
    view: memoryview | None
    """None: the row is verified and copied nowhere."""


class WrittenPack(NamedTuple):
    """The end of a write: the header of the object, and whether it was made."""

    header: layout.PackHeader
    made: bool
    """False: an object of this name was there, or the write failed."""
    failure: Failure | None = None


def read_header(
    objects: Objects, name: str, namespace: str, key: bytes, largest: Largest
) -> ReadHeader:
    """The header of the pack `name`, checked whole, and against what this server can hold."""
    try:
        head, header = read_start(objects, name, namespace, key, layout.HEADER_READ_BYTES)
        *_, last = layout.offsets_of(header, layout.header_bytes_of(head.data))
        if last + header.stored_lengths[-1] != head.num_bytes:
            raise layout.PackDamaged(f"{head.num_bytes} bytes, not those of its rows")
        largest.check(header)
    except BucketError as error:
        if error.failure is Failure.SHORT:
            return ReadHeader(None, damage=str(error))
        return ReadHeader(None, failure=error.failure)
    except layout.PackDamaged as error:
        return ReadHeader(None, damage=str(error))
    except layout.PackForeign as error:
        return ReadHeader(None, foreign=error.counter)
    return ReadHeader(header, head.modified, start=bytes(head.data[: layout.START_BYTES]))


def read_start(
    objects: Objects, name: str, namespace: str, key: bytes, num_bytes: int
) -> tuple[Head, layout.PackHeader]:
    """The first `num_bytes` of a pack, more where its header is longer, and its header. Raises
    `BucketError`, `PackDamaged`, and `PackForeign` also where rows cannot be decompressed here."""
    head = objects.read_head(name, num_bytes)
    header_bytes = layout.header_bytes_of(head.data)
    if header_bytes > head.data.nbytes:
        head = head._replace(data=objects.read(name, 0, header_bytes))
    header = layout.decode_header(head.data, namespace, key)
    if header.codec and codec_named(header.codec, header.element_bytes) is None:
        raise layout.PackForeign("headers_codec", f"it is compressed with {header.codec}")
    return head, header


def are_intact(data: memoryview, rows: Sequence[BucketBlock]) -> list[bool]:
    """Whether each of `rows` is intact in `data`, a whole object."""
    return copy_rows(data, 0, [Want(row, None) for row in rows])


def copy_rows(body: memoryview, begin: int, wants: Sequence[Want]) -> list[bool]:
    """Whether each row of `wants` is intact in `body`, which begins at `begin` in the object; the
    views of these are filled."""
    return [_copy(body, begin, want) for want in wants]


def _copy(body: memoryview, begin: int, want: Want) -> bool:
    block, view = want
    start = block.offset - begin
    data = body[start : start + block.stored]
    if block.stored < block.length:
        view = view if view is not None else memoryview(bytearray(block.length))
        if not _decompress(block, data, view):
            return False
        data = view
    elif view is not None and block.length:
        # numpy releases the interpreter while it copies, and the hash while it reads.
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))
        data = view
    return protocol.checksum(block.namespace, block.key, data) == block.checksum


def _decompress(block: BucketBlock, data: memoryview, into: memoryview) -> bool:
    codec = codec_named(block.pack.codec, block.pack.element_bytes)
    try:
        if codec is not None:
            codec.decompress(data, into, block.pack.element_bytes)
    except CodecError:
        return False
    return codec is not None


def write_pack(
    objects: Objects,
    name: str,
    header: layout.PackHeader,
    views: Sequence[memoryview],
    *,
    create: bool,
    room: Room,
    compress: str = NONE,
) -> WrittenPack:
    """Write a pack, compressed with the codec of that name where rows become shorter."""
    codec, num_bytes = codec_named(compress), sum(view.nbytes for view in views)
    with room.take("writes", num_bytes if codec is None else 2 * num_bytes):
        if codec is not None:
            header, views = _compressed(codec, compress, header, views)
        try:
            made = objects.put(name, _pieces_of(header, views), create=create)
        except BucketError as error:
            return WrittenPack(header, False, error.failure)
        return WrittenPack(header, made)


def _pieces_of(header: layout.PackHeader, views: Sequence[memoryview]) -> list[bytes | memoryview]:
    """The bytes of a pack, whose rows begin at pages."""
    encoded = layout.encode_header(header)
    pieces: list[bytes | memoryview] = [encoded]
    end = len(encoded)
    for offset, view in zip(layout.offsets_of(header, len(encoded)), views, strict=True):
        if offset > end:
            pieces.append(bytes(offset - end))
        if view.nbytes:
            pieces.append(view)
        end = offset + view.nbytes
    return pieces


def _compressed(
    codec: Codec, name: str, header: layout.PackHeader, views: Sequence[memoryview]
) -> tuple[layout.PackHeader, Sequence[memoryview]]:
    """The rows as they are stored, and their header. A row that saves no page stays as it is."""
    element_bytes = element_bytes_of(codec, max(views, key=lambda view: view.nbytes))
    stored = []
    for view in views:
        shorter = memoryview(codec.compress(view, element_bytes)) if view.nbytes else view
        stored.append(shorter if padded(shorter.nbytes) < padded(view.nbytes) else view)
    lengths = [view.nbytes for view in stored]
    if lengths == [view.nbytes for view in views]:
        return header, views
    header = msgspec.structs.replace(
        header, codec=name, element_bytes=element_bytes, stored=lengths
    )
    return header, stored
