"""Ways to compress a row, of which `--pack-compress` has one."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from remote_server.store.bucket.packs import codecs

PEER = "codecs"

CHOSEN = "--pack-compress zstd"
ZSTD_LEVELS = (1, 3)
BLOSC_LEVELS = {"lz4": 5, "zstd": 1}


class Way(NamedTuple):
    """Both directions of one codec, on one thread."""

    name: str
    compress: Callable[[bytes], Any]
    decompress: Callable[[Any, bytearray], object]
    """Fills the row, which is as long as it was."""


def all_of(element_bytes: int) -> dict[str, Callable[[], Way]]:
    """Ways by name, for rows of numbers of `element_bytes`. A call raises `Skipped` where the
    library is missing."""
    makers: dict[str, Callable[[], Way]] = {CHOSEN: partial(_chosen, element_bytes)}
    for level in ZSTD_LEVELS:
        name = f"zstd {level}, as it is"
        makers[name] = partial(_zstd, name, level)
    makers["lz4, as it is"] = partial(_lz4, "lz4, as it is")
    for codec, level in BLOSC_LEVELS.items():
        for filtering in ("SHUFFLE", "BITSHUFFLE"):
            name = f"blosc2 {codec} {level}, {filtering.lower()}"
            makers[name] = partial(_blosc2, name, codec.upper(), level, filtering, element_bytes)
    return makers


def _chosen(element_bytes: int) -> Way:
    try:
        codec = codecs.Zstd()
    except ImportError as error:
        raise Skipped(f"{error}: pip install '.[bucket]'") from None
    return Way(
        CHOSEN,
        lambda row: codec.compress(memoryview(row), element_bytes),
        lambda data, row: codec.decompress(memoryview(data), memoryview(row), element_bytes),
    )


def _zstd(name: str, level: int) -> Way:
    try:
        import zstandard
    except ImportError as error:
        raise Skipped(f"{error}: pip install '.[bucket]'") from None

    def compress(row: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=level).compress(row)

    def decompress(data: bytes, row: bytearray) -> None:
        row[:] = zstandard.ZstdDecompressor().decompress(data)

    return Way(name, compress, decompress)


def _lz4(name: str) -> Way:
    lz4 = peer_folder.package(PEER, "lz4.block")

    def decompress(data: bytes, row: bytearray) -> None:
        row[:] = lz4.decompress(data, uncompressed_size=len(row))

    return Way(name, lambda row: lz4.compress(row, store_size=False), decompress)


def _blosc2(name: str, codec: str, level: int, filtering: str, element_bytes: int) -> Way:
    blosc2 = peer_folder.package(PEER, "blosc2")
    options = {
        "codec": blosc2.Codec[codec], "clevel": level, "typesize": element_bytes, "nthreads": 1,
        "filters": [blosc2.Filter[filtering]], "filters_meta": [0],
    }  # fmt: skip
    return Way(
        name,
        lambda row: blosc2.compress2(row, **options),
        lambda data, row: blosc2.decompress2(data, dst=row, nthreads=1),
    )
