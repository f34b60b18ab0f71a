"""Digest of weight files, by samples of every tensor in them."""

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kv_connector.identity.fact_text import NotKnown

_WINDOW_BYTES = 4 << 10
# A tensor up to this size is read whole: norms, biases, scales.
_SMALL_BYTES = 32 << 10
# A tensor has two windows, and one more for each of these, at most `_MOST_WINDOWS`.
_BYTES_PER_WINDOW = 8 << 20
_MOST_WINDOWS = 16
_PLAIN_WINDOWS = 4096
_HEAD_BYTES = 1 << 20

# safetensors itself refuses a longer header.
_MOST_HEADER_BYTES = 100_000_000

# Reads of one file are sequential, those of several files parallel: a cold disk or a network file
# system serves many at once.
_FILES_AT_ONCE = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_of_files(files: Sequence[Path]) -> str:
    """32 hexadecimal digits for the content of `files` and their names without folders.

    Raises `NotKnown` for a file that is not of the format of its name, `OSError` for one that
    cannot be read.
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
        # Without this the kernel reads at least 128 KiB around every window.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for piece in _pieces(path, descriptor, size):
            sampled.update(piece)
    finally:
        os.close(descriptor)
    return sampled.hexdigest()


def _named_digest(path: Path) -> str | None:
    """The SHA-256 in the name of a file of the hub's cache: `snapshots/…/x -> blobs/<SHA-256>`."""
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
        # The windows are only for a container written without CRC-32. They include the member's
        # own header, which is harmless.
        yield from _windows(descriptor, member.filename, member.header_offset, member.compress_size)


def _plain(descriptor: int, size: int) -> Iterator[bytes]:
    yield os.pread(descriptor, _HEAD_BYTES, 0)
    yield os.pread(descriptor, _HEAD_BYTES, max(0, size - _HEAD_BYTES))
    yield from _windows(descriptor, "", 0, size, _PLAIN_WINDOWS)


def _windows(
    descriptor: int, name: str, start: int, length: int, count: int | None = None
) -> Iterator[bytes]:
    """Windows of the `length` bytes at `start`: one in each equal part, at a position derived from
    `name`; all of the bytes if they are few."""
    count = count or min(_MOST_WINDOWS, 2 + length // _BYTES_PER_WINDOW)
    if length <= max(_SMALL_BYTES, count * _WINDOW_BYTES):
        yield os.pread(descriptor, length, start)
        return
    part = length // count
    for i in range(count):
        chosen = hashlib.sha256(f"{i} {name}".encode()).digest()
        offset = int.from_bytes(chosen[:8], "little") % (part - _WINDOW_BYTES + 1)
        yield os.pread(descriptor, _WINDOW_BYTES, start + i * part + offset)
