"""Lines of a trace file, plain or gzipped, with a sentence for each way in which it is no text."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, cast

from remote_server.traces.trace import TraceError

MAX_LINE = 64 << 20
"""Characters. The longest line of a published trace has about 40,000."""

Lines = Iterator[tuple[int, str]]
"""The number of each line that is not blank, from 1, and its text."""

_GZIP_MAGIC = b"\x1f\x8b"


def lines_of(path: Path) -> Lines:
    """The lines of `path`, without a byte-order mark and blank lines. Raises `TraceError`."""
    number = 0
    try:
        with ExitStack() as stack:
            text = io.TextIOWrapper(_opened(path, stack), "utf-8-sig")
            while line := text.readline(MAX_LINE):
                number += 1
                if len(line) == MAX_LINE and not line.endswith("\n"):
                    raise TraceError(f"{path}, line {number:,} is longer than 64 MiB: no trace")
                if line.strip():
                    yield number, line
    except EOFError:
        raise TraceError(
            f"{path}: the gzip archive is cut after line {number:,}: fetch it again, or keep its "
            f"whole lines with `zcat {path} | head -n {number}`"
        ) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path}: the gzip archive is damaged after line {number:,} ({error}): fetch it again"
        ) from None
    except UnicodeDecodeError:
        raise TraceError(
            f"{path}: no UTF-8 text after line {number:,}; a trace is JSON lines or CSV, plain or "
            "gzipped"
        ) from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _opened(path: Path, stack: ExitStack) -> IO[bytes]:
    file = stack.enter_context(path.open("rb"))
    is_packed = file.peek(2)[:2] == _GZIP_MAGIC  # a pipe cannot go back
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if is_packed else file
