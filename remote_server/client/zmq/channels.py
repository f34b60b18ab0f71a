"""Channels of puts and gets in frames of ZeroMQ messages."""

from collections.abc import Iterator

from remote_server.client.connection.channel import Channel, ClientContext
from remote_server.client.zmq.get import ZmqGets
from remote_server.client.zmq.put import ZmqPuts
from remote_server.shm.region import RegisteredRegion


def open_channels(
    client_context: ClientContext, region: RegisteredRegion | None
) -> Iterator[Channel]:
    """Those of every client; none for a `region`. Raises as `Connection` does."""
    if region is None:
        yield ZmqGets(client_context)
        yield ZmqPuts(client_context)
