"""Loop context: what all parts of one server's loop share."""

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from remote_server.guard import Guard


@dataclass(frozen=True, slots=True, eq=False)
class LoopContext:
    """One for each server. Its loop's thread alone uses it, but for `wake`."""

    poller: zmq.Poller
    clock: Callable[[], float]
    guard: Guard
    """Runs each part of a turn, so that none can end the server."""
    wake: Callable[[], None]
    """Makes the loop take a turn soon, from any thread."""
