"""Compression of rows: each by itself, without loss, in libraries that release the interpreter.

KV cache is numbers of 16 or 8 bits, whose exponents repeat and whose mantissas are noise. So the
low bytes of a row's numbers and their high bytes are compressed apart, as two planes. A plane that
does not become shorter is kept as it is, and costs a copy.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from remote_server.errors import ConfigError

NONE, ZSTD = "none", "zstd"
NAMES = (NONE, ZSTD)
"""The choices of `--pack-compress`."""

ELEMENT_BYTES = (1, 2)
"""Sizes of numbers that are tried: the server knows bytes alone."""

_LEVEL = 1

# Of zstd's table of earlier strings. KV cache has few of them: a small table is faster, and what
# is not taken for a string is entropy-coded, which is shorter (1.47 for 1.46 on bf16).
_HASH_LOG = 6

_SAMPLE_BYTES = 1 << 14

# A sample that saves less than this part of it is noise.
_LEAST_SAVED = 1 / 50

_LENGTH = struct.Struct("<I")

Bytes = npt.NDArray[np.uint8]


class CodecError(Exception):
    """Bytes that are not a compressed row of the expected length."""


class Codec(Protocol):
    """Used by several threads at a time."""

    def compress(self, data: memoryview, element_bytes: int) -> bytes:
        """`data`, which is not empty, in fewer bytes or more."""

    def decompress(self, data: memoryview, into: memoryview, element_bytes: int) -> None:
        """Fill `into` from the compressed `data`. Raises `CodecError` for any other bytes, after
        no larger allocation than `into`."""


class Zstd:
    """Zstandard. A row is its planes, each behind its stored length, which is that of the plane
    where it is not compressed."""

    def __init__(self) -> None:
        """Raises `ImportError`."""
        import zstandard

        self._zstd = zstandard
        self._params = zstandard.ZstdCompressionParameters.from_level(_LEVEL, hash_log=_HASH_LOG)

    def compress(self, data: memoryview, element_bytes: int) -> bytes:
        compressor = self._zstd.ZstdCompressor(compression_params=self._params)
        parts: list[bytes | memoryview] = []
        for plane in _planes(data, element_bytes):
            stored: bytes | memoryview = plane
            if _saves(compressor.compress, plane):
                shorter = compressor.compress(plane)
                stored = shorter if len(shorter) < plane.nbytes else plane
            parts += _LENGTH.pack(len(stored)), stored
        return b"".join(parts)

    def decompress(self, data: memoryview, into: memoryview, element_bytes: int) -> None:
        sizes = _plane_sizes(into.nbytes, element_bytes)
        planes: list[memoryview] = []
        for size in sizes:
            if data.nbytes < _LENGTH.size:
                raise CodecError("a plane without a length")
            (stored,) = _LENGTH.unpack_from(data)
            plane, data = data[_LENGTH.size :][:stored], data[_LENGTH.size + stored :]
            planes.append(plane if plane.nbytes == size else self._plane(plane, size))
        if data.nbytes:
            raise CodecError(f"{data.nbytes} bytes behind the last plane")
        _join(planes, into)

    def _plane(self, data: memoryview, size: int) -> memoryview:
        try:
            # The length in the frame decides what is allocated.
            if self._zstd.frame_content_size(data) != size:
                raise CodecError("a frame of another length")
            decompressor = self._zstd.ZstdDecompressor(max_window_size=_window(size))
            plane = decompressor.decompress(data, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise CodecError(str(error)) from error
        if len(plane) != size:
            raise CodecError(f"{len(plane)} bytes of {size}")
        return memoryview(plane)


_CODECS: dict[str, Callable[[], Codec]] = {ZSTD: Zstd}


def codec_named(name: str, element_bytes: int = 1) -> Codec | None:
    """None for one that this server does not know, or has no library for."""
    if element_bytes not in ELEMENT_BYTES:
        return None
    try:
        return _CODECS[name]()
    except (KeyError, ImportError):
        return None


def check_name(name: str) -> None:
    """Raise `ConfigError` unless this server can write packs with `--pack-compress name`."""
    if name not in NAMES:
        raise ConfigError(f"pack_compress: {name!r} is none of {', '.join(NAMES)}")
    if name != NONE and codec_named(name) is None:
        raise ConfigError(f"pack_compress: this server has no {name}: pip install '.[bucket]'")


def element_bytes_of(codec: Codec, data: memoryview) -> int:
    """The size of numbers with which a sample of `data` becomes the shortest."""
    sample = _sample(data, 4 * _SAMPLE_BYTES)
    return min(ELEMENT_BYTES, key=lambda size: len(codec.compress(sample, size)))


def _sample(data: memoryview, num_bytes: int) -> memoryview:
    """The middle of `data`, from the beginning of a number on."""
    begin = max(0, (data.nbytes - num_bytes) // 2) & -16
    return data[begin : begin + num_bytes]


def _saves(compress: Callable[[memoryview], bytes], plane: memoryview) -> bool:
    """Whether a sample of `plane` becomes shorter. A plane of noise would take as long as one that
    does."""
    sample = _sample(plane, _SAMPLE_BYTES)
    return len(compress(sample)) < sample.nbytes * (1 - _LEAST_SAVED)


def _plane_sizes(length: int, element_bytes: int) -> list[int]:
    """The planes of a row of `length` bytes: one where its numbers do not divide it."""
    if length % element_bytes:
        element_bytes = 1
    return [length // element_bytes] * element_bytes


def _planes(data: memoryview, element_bytes: int) -> Iterator[memoryview]:
    if len(_plane_sizes(data.nbytes, element_bytes)) == 1:
        yield data
        return
    numbers = np.frombuffer(data, "<u2")
    low, high = np.empty((2, numbers.size), np.uint8)
    np.copyto(low, numbers, casting="unsafe")
    np.right_shift(numbers, 8, out=high, casting="unsafe")
    yield low.data
    yield high.data


def _join(planes: list[memoryview], into: memoryview) -> None:
    """The inverse of `_planes`."""
    first, *others = (np.frombuffer(plane, np.uint8) for plane in planes)
    if not others:
        np.copyto(np.frombuffer(into, np.uint8), first)
        return
    numbers = np.frombuffer(into, "<u2")
    np.left_shift(others[0], 8, out=numbers, dtype=np.uint16, casting="unsafe")
    np.bitwise_or(numbers, first, out=numbers)


def _window(length: int) -> int:
    """The largest window of a frame of `length` bytes, a power of two."""
    return max(1 << 10, 1 << (length - 1).bit_length())
