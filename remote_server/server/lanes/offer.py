"""The setting of lanes: whether a server offers them, and where."""

import logging
import os
from pathlib import Path

from remote_server.certificate import Certificate
from remote_server.errors import ConfigError, TlsFailed
from remote_server.keys import certificate_path, read_certificate
from remote_server.native import why_no_tls
from remote_server.native.lanes import make_lanes
from remote_server.native.mover import library_or_reason
from remote_server.server.config import ServerConfig
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.lanes.listener import MAX_PENDING
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
    return 0 if config.lanes == LANES_OFF else MAX_PENDING + 2 + 2 * MOST_THREADS


def offer_lanes(lanes: ServerLanes, config: ServerConfig, endpoint: str) -> None:
    """Have `lanes` offered as `config` requires, beside `endpoint`, where the server listens.

    With `auto` there are none without the C library: the reference in Python holds the interpreter
    while it moves bytes, which delays all requests, and moves blocks of 64 KiB at half of ZeroMQ's
    speed (1.1 against 2.4 GB/s got) and larger ones no faster. One line is logged then.

    With keys lanes are encrypted: there are none without a certificate, or without OpenSSL.

    Raises `ConfigError` when the address of the setting is not available, or the certificate cannot
    be used.
    """
    if config.lanes == LANES_OFF:
        return
    library = library_or_reason()
    certificate = read_certificate(certificate_path(config.keys)) if config.keys else None
    no_tls = why_no_tls() if config.keys else ""
    # Clients see the reason: it names no folder of this host.
    if config.lanes == LANES_AUTO and isinstance(library, str):
        lanes.why_none = f"they are slow without the C library ({library})"
    elif no_tls:
        lanes.why_none = f"connections have keys, and lanes cannot be encrypted: {no_tls}"
    elif config.keys and certificate is None:
        name = Path(certificate_path(config.keys)).name
        lanes.why_none = (
            f"connections have keys, and there is no certificate: `kvferry keys FOLDER` makes "
            f"{name} beside the keys"
        )
    else:
        lanes.why_none = ""
        _begin(lanes, config, endpoint, certificate)
    if lanes.why_none:
        log.info("no lanes, blocks go through ZeroMQ: %s", lanes.why_none)


def _begin(
    lanes: ServerLanes, config: ServerConfig, endpoint: str, certificate: Certificate | None
) -> None:
    given = lanes_address(config.lanes)
    try:
        engine = make_lanes(num_threads())
    except OSError as error:
        lanes.why_none = f"no threads for them: {error.strerror or error}"
        return
    try:
        host = given.reachable_host if given else ""
        lanes.begin(engine, given or lanes_beside(endpoint), host, certificate)
    except TlsFailed as error:
        engine.close()
        raise ConfigError(f"keys: {error}") from None
    except ConfigError as error:
        engine.close()
        if config.lanes != LANES_AUTO:
            raise
        lanes.why_none = str(error)
