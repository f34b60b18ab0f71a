"""The transport whose blocks are payload frames of ZeroMQ messages."""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.copier import Copier, Uncopied
from remote_server.server.transfer.get import Get, Gets
from remote_server.server.transfer.put import Puts, Source
from remote_server.server.transfer.transport import Transport
from remote_server.server.zmq.get import FrameGet, WholeGet
from remote_server.server.zmq.put import FramePuts, Frames


class ZmqTransport(Transport):
    """Takes every request: it must be the last one in the list."""

    def __init__(self, puts: Puts, gets: Gets, copier: Copier, tenant: str) -> None:
        super().__init__(puts, gets)
        self.copier = copier
        self.uncopied = Uncopied(puts.store.memory.stats().budget_bytes)
        self._frame_puts = FramePuts(puts.store, copier, self.uncopied, tenant)

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return True

    def _source(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Source:
        return Frames(self._frame_puts, client, request, payload)

    def _get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Get:
        return (FrameGet if request.stream else WholeGet)(self._gets, client, request, times)
