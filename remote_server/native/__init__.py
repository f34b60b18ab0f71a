"""The mover of bytes and the lanes: copies, reads, writes and TCP, in C or in Python."""

from remote_server.native.base import Mover
from remote_server.native.job import Job, Kind, Priority
from remote_server.native.lane_base import LaneJob, LaneKind, Lanes
from remote_server.native.lanes import make_lanes
from remote_server.native.mover import make_mover, what_moves
from remote_server.native.tls import make_tls_context, why_no_tls
from remote_server.native.tls_base import TlsConnection, TlsContext

__all__ = [
    "Job", "Kind", "LaneJob", "LaneKind", "Lanes", "Mover", "Priority",
    "TlsConnection", "TlsContext", "make_lanes", "make_mover", "make_tls_context", "what_moves",
    "why_no_tls",
]  # fmt: skip
