"""Context of a client that all its channels share, and the receiver of their small replies."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from remote_server import protocol
from remote_server.client.connection import Connection
from remote_server.client.results import ClientConfig, Counters
from remote_server.client.session import Session
from remote_server.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

# Messages processed before the other connections get their turn.
_TURN_MESSAGES = 64


@dataclass(frozen=True, slots=True, eq=False)
class ClientContext:
    """One for each client, used by its I/O thread."""

    config: ClientConfig
    session: Session
    counters: Counters
    clock: Callable[[], float]

    on_reply: Callable[[protocol.Reply], bool]
    """Whether to process a reply that has come."""

    verify: Callable[[str, list[bytes]], None]
    """Makes the server verify its copies of these keys of a namespace, which came out wrong."""

    next_request_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)


class ReplyReader:
    """The replies on `connection`, none with a payload; passes on those of the current server.

    `name` is for the log.
    """

    def __init__(self, connection: Connection, client_context: ClientContext, name: str) -> None:
        self._connection = connection
        self._counters = client_context.counters
        self._on_reply = client_context.on_reply
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
                if self._on_reply(reply):
                    take(reply)
            except RemoteProtocolError as error:
                self._counters["protocol_errors"] += 1
                logger.debug("%s: %s", self._name, error)
