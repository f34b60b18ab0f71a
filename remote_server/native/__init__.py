"""The mover of bytes: copies, reads and writes with their checksums, in C or in Python."""

from remote_server.native.base import Mover
from remote_server.native.job import Job, Kind, Priority
from remote_server.native.mover import make_mover, what_moves

__all__ = ["Job", "Kind", "Mover", "Priority", "make_mover", "what_moves"]
