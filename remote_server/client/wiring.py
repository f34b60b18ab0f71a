"""What every lane of a client is given, so that it need not be passed on one by one."""

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
    """Whether a reply that has come is worth reading."""

    verify: Callable[[str, list[bytes]], None]
    """Has the server look at its copies of these keys of a namespace, which came out wrong."""

    next_request_id: Callable[[], int] = field(default_factory=lambda: count(1).__next__)
