"""Receiver of one connection's small replies, which checks that they are this server's."""

import logging
from collections.abc import Callable

from remote_server import protocol
from remote_server.client.connection import Connection
from remote_server.client.wiring import Wiring
from remote_server.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

# Messages processed before the other connections get their turn.
_TURN_MESSAGES = 64


class Inbox:
    """The replies on `connection`, none of which has a payload. `name` is for the log."""

    def __init__(self, connection: Connection, wiring: Wiring, name: str) -> None:
        self._connection = connection
        self._counters = wiring.counters
        self._heard = wiring.heard
        self._name = name

    def empty_into(self, take: Callable[[protocol.Reply], None]) -> None:
        """Pass the replies that have come to `take`, which may raise `RemoteProtocolError`."""
        for _ in range(_TURN_MESSAGES):
            try:
                reply = self._connection.receive()
                if reply is None:
                    return
                if self._connection.discard_rest():
                    raise RemoteProtocolError(f"a {type(reply).__name__} came with a payload")
                if self._heard(reply):
                    take(reply)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("%s: %s", self._name, error)
