"""A server in this process whose blocks are in memory alone."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB


@contextmanager
def memory_server(clock: Callable[[], float] = time.monotonic, **settings: Any) -> Iterator[Server]:
    """With 16 slabs of 1 MiB, lanes, and these `settings`. Its accounting is checked at the end."""
    lanes = "127.0.0.1:*"  # also without the C library
    given = {
        "bind": "tcp://127.0.0.1:*", "lanes": lanes, "memory": 16 * MiB, "populate": False,
        **settings,
    }  # fmt: skip
    with Server(ServerConfig(**given), clock) as server:
        yield server
    server.store.tier_stack.check()
    assert server.store.counters["refused_internal"] == 0
