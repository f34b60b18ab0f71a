"""The process that makes a pool, as the first worker of an engine does: `python -m
benchmarks.gpu_check.pool_holder BYTES`.

It prints the pool's path. Then it fills the first bytes at each line of its input, and sends a
digest of them at each line `digest`. It ends with its input.
"""

import fcntl
import hashlib
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FILLED_BYTES = 1 << 20
"""Bytes at the start of the pool that are filled and digested."""

OWN_WAY = "as the connector's, which cannot be imported here"


class Pool(NamedTuple):
    descriptor: int
    path: Path
    """Where other processes open it."""
    way: str


def make_pool(num_bytes: int) -> Pool:
    """A sealed file in memory. By the connector's own function where its packages are installed."""
    try:
        from kv_connector.pool.pool_file import offer_sealed_file, pool_name, pool_path
    except ImportError:
        return make_like_connector(num_bytes)
    name = pool_name(os.getpid(), "gpu-check")
    descriptor = offer_sealed_file(name, num_bytes)
    if descriptor is None:
        raise RuntimeError(f"{pool_path(name)} exists already")
    return Pool(descriptor, pool_path(name), "by the connector's own function")


def make_like_connector(num_bytes: int) -> Pool:
    """The same without the connector's packages; a test compares both."""
    descriptor = os.memfd_create("kvferry-gpu-check", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    never_resized = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, never_resized)
    return Pool(descriptor, Path(f"/proc/{os.getpid()}/fd/{descriptor}"), OWN_WAY)


def pattern(number: int) -> bytes:
    """The bytes of the `number`-th filling."""
    word = hashlib.blake2b(str(number).encode(), digest_size=64).digest()
    return word * (FILLED_BYTES // len(word))


def main() -> None:
    pool = make_pool(int(sys.argv[1]))
    try:
        with mmap.mmap(pool.descriptor, FILLED_BYTES) as start:
            print(f"{pool.path}\t{pool.way}", flush=True)
            number = 0
            for line in sys.stdin:
                if line.strip() == "digest":
                    print(hashlib.blake2b(start[:]).hexdigest(), flush=True)
                else:
                    start[:] = pattern(number)
                    print(number, flush=True)
                    number += 1
    finally:
        if pool.path.is_symlink():
            with suppress(OSError):
                pool.path.unlink()


if __name__ == "__main__":
    main()
