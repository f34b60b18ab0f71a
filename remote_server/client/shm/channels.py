"""Channels of shared memory."""

from collections.abc import Iterator
from contextlib import ExitStack

import zmq

from remote_server.client.connection.channel import Channel, ClientContext
from remote_server.client.shm.get import ShmGets
from remote_server.client.shm.link import ShmLink
from remote_server.client.shm.put import ShmPuts
from remote_server.native.moves import Moves
from remote_server.shm.region import RegisteredRegion, Tickets


def open_channels(
    client_context: ClientContext, region: RegisteredRegion | None
) -> Iterator[Channel]:
    """Those for rows in `region`, which they own from then on; none without one. Raises `OSError`,
    and then nothing is open."""
    if region is None:
        return
    with ExitStack() as opened:
        moves = Moves()
        opened.callback(moves.close)
        link = _open_link(client_context, region)
        opened.callback(link.close)
        channels = link, ShmGets(client_context, link, moves), ShmPuts(client_context, link)
        opened.pop_all()
    yield from channels


def _open_link(client_context: ClientContext, region: RegisteredRegion) -> ShmLink:
    """With its tickets. Raises `OSError`, and then nothing is open."""
    tickets = Tickets()
    try:
        return ShmLink(client_context, region, tickets)
    except BaseException as error:
        tickets.close()
        if isinstance(error, zmq.ZMQError):
            raise OSError(error.errno, str(error)) from error
        raise
