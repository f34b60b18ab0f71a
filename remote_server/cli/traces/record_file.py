"""The file of a recorded trace: new, readable by its owner alone, gzipped by its name, bounded."""

import os
import zlib
from pathlib import Path
from typing import Protocol, Self

from remote_server.errors import ConfigError, KVFerryError
from remote_server.keys import create_new
from remote_server.values import KiB

END_BYTES = 256
"""Kept for the last line."""

FLUSH_BYTES = 64 * KiB
"""What a compressor may hold back. Without compression nothing is."""

# zlib adds so much at most to what does not compress, beside a header and an end.
_SPARE_SHARE, _SPARE_BYTES = 1000, 64


class NotWritten(KVFerryError):
    """The file's disk takes no more."""


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...

    def flush(self, mode: int = ..., /) -> bytes: ...


class TraceFile:
    """Lines written one behind the other, up to `max_bytes` with the last one."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Raises `ConfigError` when the file exists or cannot be made."""
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Written so far."""
        self._held = 0
        """Bytes of lines that the compressor may hold back."""
        self._gzip: _Compressor | None = None
        if path.name.endswith(".gz"):
            self._gzip = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
        try:
            self._file = open(create_new(path), "wb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise ConfigError(f"{path} exists, and is not overwritten") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path} cannot be made: {reason}") from None

    def write(self, line: bytes) -> bool:
        """False, and nothing is written, when the file would be too large with it. Raises
        `NotWritten`."""
        size = self._most(self._held + len(line)) + self._most(END_BYTES)
        if self.num_bytes + size > self._max_bytes:
            self._flush()
            size = self._most(len(line)) + self._most(END_BYTES)
            if self.num_bytes + size > self._max_bytes:
                return False
        self._append(line)
        return True

    def end(self, line: bytes) -> None:
        """Write the last line. Raises `NotWritten`."""
        self._append(line)
        if self._gzip is not None:
            self._out(self._gzip.flush(zlib.Z_FINISH))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _append(self, line: bytes) -> None:
        if self._gzip is None:
            self._out(line)
            return
        self._held += len(line)
        self._out(self._gzip.compress(line))
        if self._held > FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._gzip is not None and self._held:
            self._out(self._gzip.flush(zlib.Z_SYNC_FLUSH))
            self._held = 0

    def _most(self, num_bytes: int) -> int:
        if self._gzip is None:
            return num_bytes
        return num_bytes + num_bytes // _SPARE_SHARE + _SPARE_BYTES

    def _out(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._file.fileno(), view)
                self.num_bytes += written
                view = view[written:]
        except OSError as error:
            raise NotWritten(f"the file cannot be written any more: {error.strerror}") from error
