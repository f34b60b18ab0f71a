"""Channels of lanes."""

from collections.abc import Iterator

from remote_server.client.connection.channel import Channel, ClientContext
from remote_server.client.lanes.get import LaneGets
from remote_server.client.lanes.link import LaneLink
from remote_server.client.lanes.put import LanePuts
from remote_server.shm.region import RegisteredRegion


def open_channels(
    client_context: ClientContext, region: RegisteredRegion | None
) -> Iterator[Channel]:
    """Those of a client that is configured so; none for a `region`. Raises as `Connection` does."""
    if region is None and client_context.config.lanes:
        link = LaneLink(client_context)
        yield link
        yield LaneGets(client_context, link)
        yield LanePuts(client_context, link)
