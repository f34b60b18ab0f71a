"""Work of the bucket's threads: packs are put together and written, headers and rows are read."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from remote_server import protocol
from remote_server.store.bucket import layout
from remote_server.store.bucket.index import BucketBlock
from remote_server.store.bucket.objects import BucketError, Failure, Objects


class ReadHeader(NamedTuple):
    """A header that was read, or why it was not."""

    header: layout.PackHeader | None
    modified: float = 0.0
    failure: Failure | None = None
    damage: str = ""


class Want(NamedTuple):
    """A row that a reader waits for. The view is as long as the row."""

    block: BucketBlock
    view: memoryview | None
    """None: the row is verified and copied nowhere."""


def read_header(objects: Objects, name: str, namespace: str, key: bytes) -> ReadHeader:
    """The header of the pack `name`, checked."""
    try:
        head = objects.read_head(name, layout.HEADER_READ_BYTES)
        data = head.data
        num_bytes = layout.header_bytes_of(data)
        if num_bytes > data.nbytes:
            data = objects.read(name, 0, num_bytes)
        header = layout.decode_header(data, namespace, key)
        *_, last = layout.offsets_of(header, num_bytes)
        if last + header.rows[-1].length > head.num_bytes:
            raise layout.PackDamaged(f"{head.num_bytes} bytes, shorter than its rows")
    except BucketError as error:
        if error.failure is Failure.SHORT:
            return ReadHeader(None, damage=str(error))
        return ReadHeader(None, failure=error.failure)
    except layout.PackDamaged as error:
        return ReadHeader(None, damage=str(error))
    return ReadHeader(header, head.modified)


def copy_rows(body: memoryview, begin: int, wants: Sequence[Want]) -> list[bool]:
    """Whether each row of `wants` is intact in `body`, which begins at `begin` in the object; the
    views of these are filled."""
    return [_copy(body, begin, want) for want in wants]


def _copy(body: memoryview, begin: int, want: Want) -> bool:
    block, view = want
    start = block.offset - begin
    data = body[start : start + block.length]
    if view is not None and block.length:
        # numpy releases the interpreter while it copies, and the hash while it reads.
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(data, np.uint8))
        data = view
    return protocol.checksum(block.namespace, block.key, data) == block.checksum


def write_pack(
    objects: Objects,
    name: str,
    header: layout.PackHeader,
    views: Sequence[memoryview],
    *,
    create: bool,
) -> tuple[bool, Failure | None]:
    """Write a pack. Returns whether it was made, False when it was there; or why it failed."""
    encoded = layout.encode_header(header)
    offsets = [*layout.offsets_of(header, len(encoded))]
    pieces: list[bytes | memoryview] = [encoded]
    end = len(encoded)
    for offset, view in zip(offsets, views, strict=True):
        if offset > end:
            pieces.append(bytes(offset - end))
        if view.nbytes:
            pieces.append(view)
        end = offset + view.nbytes
    try:
        return objects.put(name, pieces, create=create), None
    except BucketError as error:
        return False, error.failure
