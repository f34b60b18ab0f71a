"""Lane user: an open lane, and the interface of the transfers that use it."""

from dataclasses import dataclass
from typing import Protocol

from remote_server import protocol
from remote_server.errors import KVFerryError
from remote_server.native import LaneJob


@dataclass(slots=True, eq=False)
class Lane:
    """An open lane."""

    number: int
    """Its name in messages."""
    handle: int
    """Its name for the engine."""
    opened_at: float
    out_bytes: int = 0
    """Submitted, and not sent yet."""
    in_bytes: int = 0
    """Requested, and not received yet."""


class LaneUser(Protocol):
    """Transfers over lanes."""

    @property
    def needs_connection(self) -> bool:
        """Something is to be sent or expected."""

    def limit(self, most_bytes: int) -> None:
        """The first lane is open, with this window. What is in flight is not affected."""

    def awaits(self, request_id: int) -> bool:
        """A reply to this request is expected."""

    def lane_of(self, request_id: int) -> Lane:
        """The lane of a request whose reply is expected."""

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process an awaited reply. Raises `RemoteProtocolError` for a wrong kind."""

    def finished(self, job: LaneJob, now: float) -> None:
        """One of its jobs has completed."""

    def lane_ended(self, lane: Lane, error: KVFerryError | None) -> None:
        """`lane` is closed, and nothing of its jobs is touched any more. End its transfers with
        `error`, or request them anew if there is none."""

    def end_all(self, error: KVFerryError) -> None:
        """End every transfer: no lane is left."""
