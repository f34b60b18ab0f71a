"""Server context: what the tenants of one server share."""

from dataclasses import dataclass

import zmq

from remote_server.native.moves import Moves
from remote_server.server.config import ServerConfig
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.loop_context import LoopContext
from remote_server.server.sending.bounds import Allowances
from remote_server.server.transfer.copier import Copier
from remote_server.store.bucket.opening import SharedBucket
from remote_server.store.io_threads import Threads


@dataclass(frozen=True, slots=True, eq=False)
class ServerContext:
    """One for each server, made before its tenants. The loop's thread alone uses it."""

    config: ServerConfig
    loop: LoopContext
    router: "zmq.Socket[bytes]"

    held: Allowances
    """What connections of all tenants hold."""

    copier: Copier
    moves: Moves
    lanes: ServerLanes

    disk_threads: Threads
    bucket: SharedBucket | None
