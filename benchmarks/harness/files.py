"""Files: checks of result files before a run, and operations on files of blocks."""

import os
import tempfile
from pathlib import Path


def why_not_into(folder: Path) -> str:
    """Why no file can be made in `folder`; empty when one can. A file is made and removed:
    permissions do not show that a file system refuses files."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} may not be written to: {error.strerror}"


def why_not_written(file: Path) -> str:
    """Why `file` cannot be written; empty when it can. Call it before measuring, so that a run of
    ten minutes does not end without its result."""
    if file.is_dir():
        return f"{file} is a folder"
    if not file.exists():
        return why_not_into(file.parent)
    return "" if os.access(file, os.W_OK) else f"{file} may not be written to"


def require_all(moved: int | None, num_bytes: int) -> None:
    """Raises `OSError` when a call moved less than it was given: its time is void."""
    if moved != num_bytes:
        raise OSError(f"{moved} of {num_bytes} bytes moved")


def drop_from_cache(path: Path) -> None:
    """Write back dirty pages, then drop them: the next read goes to the device."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: a full disk or a kill keeps the one of before. What is no
    regular file, such as /dev/stdout, and a file in a folder that takes no other one, are written
    to in place. Raises `OSError`."""
    path = Path(os.path.realpath(path))
    if path.exists() and (not path.is_file() or not os.access(path.parent, os.W_OK)):
        path.write_text(text)
        return
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(text)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
