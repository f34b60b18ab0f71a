"""Small regular files that an operator names in a setting, read in one go.

A setting may name anything by mistake: a directory, an endless device, a pipe without a writer.
None of them may hang the process, fill its memory or end it in a traceback.
"""

import os
import stat
import tomllib
from typing import Any, NamedTuple

from remote_server.errors import ConfigError

# A tenants file with 64 tenants of a hundred keys each has 300 KB.
MAX_FILE_BYTES = 1 << 20


class SmallFile(NamedTuple):
    """Content of a file, and its mode and owner at that moment."""

    data: bytes
    status: os.stat_result


def read_small(path: str, setting: str) -> SmallFile:
    """The file at `path`. Raises `ConfigError` with `setting` and the path when it cannot be read,
    is no regular file or has more than `MAX_FILE_BYTES`. Never waits for a writer."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the path
        raise ConfigError(f"{setting}: cannot read {path!r}: {error}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{setting}: {path} is {_kind(status.st_mode)}, not a regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{setting}: {path} has more than {MAX_FILE_BYTES} bytes")
    return SmallFile(data, status)


def toml_of(data: bytes, path: str, setting: str) -> dict[str, Any]:
    """`data` as TOML. Raises `ConfigError` with `setting`, the path and the defect."""
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{setting}: {path} is not TOML: byte {error.start} is not UTF-8"
        ) from None
    except RecursionError:
        raise ConfigError(f"{setting}: {path} is not TOML: it is nested too deep") from None
    except ValueError as error:  # TOMLDecodeError, or a number that Python does not convert
        raise ConfigError(f"{setting}: {path} is not TOML: {error}") from error


def _kind(mode: int) -> str:
    kinds = {
        stat.S_ISDIR: "a directory", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device",
        stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket",
    }  # fmt: skip
    return next((name for is_it, name in kinds.items() if is_it(mode)), "something else")
