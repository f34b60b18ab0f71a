"""Digests of weight files from little reading: every tensor is sampled, no file is read whole.

Three kinds of files. A safetensors file has its header hashed and windows of every tensor; a
small tensor is read whole. A zip container, as `torch.save` writes it, has a CRC-32 of each of
its members in its directory: with windows of each member that comes near to a digest of all
bytes. Any other file is sampled in up to 4,096 windows. A file of the hub's cache is not read:
its name is the SHA-256 of its content.
"""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv_connector.fact_text import NotKnown

_WINDOW_BYTES = 4 << 10
# A tensor of no more than this is read whole: norms, biases, scales.
_SMALL_BYTES = 32 << 10
# A tensor has two windows, and one more for each of these, up to the most.
_BYTES_PER_WINDOW = 8 << 20
_MOST_WINDOWS = 16
_PLAIN_WINDOWS = 4096
_HEAD_BYTES = 1 << 20

# safetensors itself refuses a longer header.
_MOST_HEADER_BYTES = 100_000_000

# Reads of one file wait for each other, those of several files do not: a cold disk or a
# network file system answers many at once.
_FILES_AT_ONCE = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_of_files(files: Sequence[Path]) -> str:
    """32 hexadecimal digits for the content of `files`, under their names without folders.

    Raises `NotKnown` for a file that is not what its name says, `OSError` for one that cannot
    be read.
    """
    ordered = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="kvferry-weights") as threads:
        digests = threads.map(_digest_of_file, ordered)
        lines = [f"{path.name} {digest}\n" for path, digest in zip(ordered, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _digest_of_file(path: Path) -> str:
    if (digest := _named_digest(path)) is not None:
        return digest
    size = path.stat().st_size
    sampled = hashlib.sha256(f"{size}\n".encode())
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Without this the kernel reads 128 KiB and more around every window.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for piece in _pieces(path, descriptor, size):
            sampled.update(piece)
    finally:
        os.close(descriptor)
    return sampled.hexdigest()


def _named_digest(path: Path) -> str | None:
    """The SHA-256 that a file of the hub's cache has for a name: `snapshots/…/x -> blobs/<it>`."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return f"{blob.stat().st_size} {blob.name}"


def _pieces(path: Path, descriptor: int, size: int) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        return _safetensors(path, descriptor, size)
    if zipfile.is_zipfile(path):
        return _zip(path, descriptor)
    return _plain(descriptor, size)


def _safetensors(path: Path, descriptor: int, size: int) -> Iterator[bytes]:
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
        raise NotKnown(f"{path} has no safetensors header")
    header = os.pread(descriptor, header_bytes, 8)
    yield header
    try:
        entries = [
            (name, *map(int, tensor["data_offsets"]))
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotKnown(f"{path} has a damaged safetensors header") from error
    data = 8 + header_bytes
    for name, begin, end in sorted(entries, key=lambda entry: entry[1]):
        if not 0 <= begin <= end <= size - data:
            raise NotKnown(f"{path} is shorter than its header announces")
        yield from _windows(descriptor, name, data + begin, end - begin)


def _zip(path: Path, descriptor: int) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        yield f"{member.filename} {member.file_size} {member.CRC}\n".encode()
        # The windows reach over the member's own header, which is no harm: they are only
        # there for a container that was written without CRC-32.
        yield from _windows(descriptor, member.filename, member.header_offset, member.compress_size)


def _plain(descriptor: int, size: int) -> Iterator[bytes]:
    yield os.pread(descriptor, _HEAD_BYTES, 0)
    yield os.pread(descriptor, _HEAD_BYTES, max(0, size - _HEAD_BYTES))
    yield from _windows(descriptor, "", 0, size, _PLAIN_WINDOWS)


def _windows(
    descriptor: int, name: str, start: int, length: int, count: int | None = None
) -> Iterator[bytes]:
    """Windows of the `length` bytes at `start`, one in each equal part, at a place that `name`
    chooses; all of the bytes when they are few."""
    count = count or min(_MOST_WINDOWS, 2 + length // _BYTES_PER_WINDOW)
    if length <= max(_SMALL_BYTES, count * _WINDOW_BYTES):
        yield os.pread(descriptor, length, start)
        return
    part = length // count
    for i in range(count):
        chosen = hashlib.sha256(f"{i} {name}".encode()).digest()
        offset = int.from_bytes(chosen[:8], "little") % (part - _WINDOW_BYTES + 1)
        yield os.pread(descriptor, _WINDOW_BYTES, start + i * part + offset)
