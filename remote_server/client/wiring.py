"""Context of a client that all its channels share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from remote_server import protocol
from remote_server.client.results import ClientConfig, Counters
from remote_server.client.session import Session


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """One for each client, used by its I/O thread."""

    config: ClientConfig
    session: Session
    counters: Counters
    clock: Callable[[], float]

    heard: Callable[[protocol.Reply], bool]
    """Whether to process a reply that has come."""

    verify: Callable[[str, list[bytes]], None]
    """Makes the server verify its copies of these keys of a namespace, which came out wrong."""

    next_request_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
