"""List of the transports of a tenant."""

from typing import NamedTuple

from remote_server import protocol
from remote_server.server.lanes.transport import LaneTransport
from remote_server.server.shm.transport import ShmTransport
from remote_server.server.transfer.transport import Transport
from remote_server.server.zmq.transport import ZmqTransport


class Transports(NamedTuple):
    """Of several that take a request the first one has it; the last one takes all."""

    lanes: LaneTransport
    shm: ShmTransport
    zmq: ZmqTransport

    def of(self, request: protocol.Put | protocol.Get) -> Transport:
        """The one that has `request`."""
        for transport in self:
            if transport.takes(request):
                return transport
        raise AssertionError("no transport takes every request")
