"""The setting of lanes: whether a server offers them, and where."""

import logging
import os

from remote_server.errors import ConfigError
from remote_server.native.lanes import make_lanes
from remote_server.native.mover import library_or_reason
from remote_server.server.config import ServerConfig
from remote_server.server.lane_listener import MAX_PENDING
from remote_server.server.lanes import ServerLanes
from remote_server.values import LANES_AUTO, LANES_OFF, lanes_address, lanes_beside

log = logging.getLogger(__name__)

# One thread moves what one core can; half of the cores are left for the loop and for other work.
LEAST_THREADS, MOST_THREADS = 2, 8


def num_threads(cores: int | None = None) -> int:
    """Threads for the lanes of a server on so many cores; without a number, on this machine's."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return max(LEAST_THREADS, min(MOST_THREADS, cores // 2))


def lane_files(config: ServerConfig) -> int:
    """The most descriptors that lanes need beside those of open ones, which are connections: those
    of the listener, of connections that are no lanes yet, and of the threads."""
    offered = config.lanes != LANES_OFF and not config.keys
    return MAX_PENDING + 2 + 2 * MOST_THREADS if offered else 0


def offer_lanes(lanes: ServerLanes, config: ServerConfig, endpoint: str) -> None:
    """Have `lanes` offered as `config` requires, beside `endpoint`, where the server listens.

    With `auto` there are none without the C library: the reference in Python holds the interpreter
    while it moves bytes, which delays all requests, and moves blocks of 64 KiB at half of ZeroMQ's
    speed (1.1 against 2.4 GB/s got) and larger ones no faster. One line is logged then.

    Raises `ConfigError` when the address of the setting is not available.
    """
    if config.lanes == LANES_OFF:
        return
    library = library_or_reason()
    if config.keys:
        lanes.why_none = "connections have keys, and lanes are not encrypted"
    elif config.lanes == LANES_AUTO and isinstance(library, str):
        lanes.why_none = f"they are slow without the C library ({library})"
    else:
        lanes.why_none = ""
        _begin(lanes, config, endpoint)
    if lanes.why_none:
        log.info("no lanes, blocks go through ZeroMQ: %s", lanes.why_none)


def _begin(lanes: ServerLanes, config: ServerConfig, endpoint: str) -> None:
    given = lanes_address(config.lanes)
    try:
        engine = make_lanes(num_threads())
    except OSError as error:
        lanes.why_none = f"no threads for them: {error.strerror or error}"
        return
    try:
        lanes.begin(engine, given or lanes_beside(endpoint), given.reachable_host if given else "")
    except ConfigError as error:
        engine.close()
        if config.lanes != LANES_AUTO:
            raise
        lanes.why_none = str(error)
