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
        tickets = Tickets()
        opened.callback(tickets.close)
        moves = Moves()
        opened.callback(moves.close)
        try:
            link = ShmLink(client_context, region, tickets)
        except zmq.ZMQError as error:
            raise OSError(error.errno, str(error)) from error
        opened.pop_all()
    yield link
    yield ShmGets(client_context, link, moves)
    yield ShmPuts(client_context, link)
