"""The smallest channel: counts the blocks of its namespace and moves none of them.

One entry in `TRANSPORTS` of `remote_server/client/loop.py` adds it to every client.
"""

from collections.abc import Iterator

from remote_server.client.connection.channel import Channel, ClientContext, Request
from remote_server.client.results import GetOutcome
from remote_server.client.transfer.get import GetTransfer
from remote_server.client.transfer.put import PutTransfer
from remote_server.errors import KVFerryError
from remote_server.shm.region import RegisteredRegion

COUNTED = "counted"
"""The namespace whose puts and gets it takes."""


class CountingChannel(Channel):
    """A put waits for the end of its turn and has no outcomes; a get misses at once."""

    name = "counting"

    def __init__(self, client_context: ClientContext) -> None:
        super().__init__(client_context)
        self.blocks_put = self.blocks_got = 0
        self.calls: list[str] = []
        self._puts: list[PutTransfer] = []

    @property
    def num_waiting(self) -> int:
        return len(self._puts)

    def offer(self, request: Request, now: float) -> bool:
        if getattr(request, "namespace", None) != COUNTED:
            return False
        if isinstance(request, GetTransfer):
            self.blocks_got += len(request.keys)
            request.end(None, GetOutcome.MISS)
        elif isinstance(request, PutTransfer):
            self._puts.append(request)
        else:
            return False
        return True

    def pump(self, now: float) -> None:
        for put in self._puts:
            self.blocks_put += len(put.keys)
            put.resolve()
        self._puts.clear()

    def end_all(self, error: KVFerryError) -> None:
        self.calls.append("end_all")
        for put in self._puts:
            put.turn_away(error)
        self._puts.clear()

    def reset(self) -> None:
        self.calls.append("reset")

    def close(self) -> None:
        self.calls.append("close")

    def check(self) -> None:
        assert not self._puts, "a put was not counted"


def open_channels(
    client_context: ClientContext, region: RegisteredRegion | None
) -> Iterator[Channel]:
    if region is None:
        yield CountingChannel(client_context)
