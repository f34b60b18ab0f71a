"""The transport whose blocks are payload frames of ZeroMQ messages."""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.protocol import Declined
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.copier import Copier, Uncopied
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.put import Put, Puts
from remote_server.server.transfer.transport import Transport
from remote_server.server.zmq.get import FrameGet, WholeGet
from remote_server.server.zmq.put import FramePuts, Frames
from remote_server.turns import Steps


class ZmqTransport(Transport):
    """Takes every request: it must be the last one in the list."""

    def __init__(self, puts: Puts, gets: Gets, copier: Copier, tenant: str) -> None:
        self.uncopied = Uncopied(puts.store.memory.stats().budget_bytes)
        self.copier = copier
        self._puts = puts
        self._gets = gets
        self._frame_puts = FramePuts(puts.store, copier, self.uncopied, tenant)

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return True

    def put(
        self,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
        declines: Declined | None,
    ) -> Steps[None]:
        source = Frames(self._frame_puts, client, request, payload)
        return Put(self._puts, client, request, source, declines=declines).steps()

    def get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Steps[None]:
        kind = FrameGet if request.stream else WholeGet
        return kind(self._gets, client, request, times).steps()
