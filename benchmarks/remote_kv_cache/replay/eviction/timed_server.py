"""A cache server whose eviction learns in the time of a trace, which its replay writes to a file.

Everything else of it follows the machine's clock.
"""

import mmap
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from remote_server.cli.__main__ import run
from remote_server.server.tenant import storage
from remote_server.store.eviction.learner import Learner

SECONDS = struct.Struct("<d")


def clock_of(path: Path) -> Callable[[], float]:
    """The time in the file at `path`."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SECONDS.size, prot=mmap.PROT_READ)
    return lambda: float(SECONDS.unpack_from(mapped)[0])


def main() -> int:
    """The first argument is the file; the others are those of a server."""
    clock = clock_of(Path(sys.argv[1]))
    vars(storage)["Learner"] = lambda _: Learner(clock)
    return run("serve", sys.argv[2:], "timed server")


if __name__ == "__main__":
    sys.exit(main())
