"""Link user: the interface of transfers whose messages a link of shared memory carries."""

from typing import Protocol

from remote_server import protocol
from remote_server.errors import KVFerryError


class LinkUser(Protocol):
    """Transfers whose messages a link carries."""

    @property
    def copying(self) -> bool:
        """Blocks remain to be copied: an extra poll is not worth its cost meanwhile."""

    @property
    def needs_connection(self) -> bool:
        """Something is to be sent or expected."""

    def awaits(self, request_id: int) -> bool:
        """A reply to this request would be in time."""

    def take(self, reply: protocol.Reply, now: float) -> None:
        """Process an awaited reply. Raises `RemoteProtocolError` for a wrong kind."""

    def take_late(self, reply: protocol.Reply) -> None:
        """Release what a reply that nothing awaits holds at the server."""

    def limit(self, arena_bytes: int) -> None:
        """The region was attached to a server with an arena of this size."""

    def stop_copying(self) -> None:
        """The server's memory is about to be unmapped: when this returns, no thread reads it."""

    def detached(self, error: KVFerryError) -> None:
        """End every transfer: the attachment has ended, and all that the server held for it."""

    def lost(self) -> None:
        """End every transfer: the connection broke, and no reply will come."""
