"""What ways that move blocks through files have in common."""

import os
from pathlib import Path


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
