"""Files: where results may go, and what ways that move blocks through files have in common."""

import os
import tempfile
from pathlib import Path


def why_not_into(folder: Path) -> str:
    """Why no file can be made in `folder`; empty when one can. Tried, because permissions do not
    tell of a file system that takes none; nothing is left behind."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} may not be written to: {error.strerror}"


def why_not_written(file: Path) -> str:
    """Why `file` cannot be written; empty when it can. To be asked before anything is measured: a
    run of ten minutes must not end with nowhere to go."""
    if file.is_dir():
        return f"{file} is a folder"
    if not file.exists():
        return why_not_into(file.parent)
    return "" if os.access(file, os.W_OK) else f"{file} may not be written to"


def require_all(moved: int | None, num_bytes: int) -> None:
    """Raises `OSError` when a call moved less than it was given: that is no time of a block."""
    if moved != num_bytes:
        raise OSError(f"{moved} of {num_bytes} bytes moved")


def drop_from_cache(path: Path) -> None:
    """Write back what is dirty, then forget it: the next read asks the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
