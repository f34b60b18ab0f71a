"""Transport: the interface of what carries the blocks of a tenant's puts and gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from remote_server import protocol
from remote_server.protocol import Declined
from remote_server.server.sending.times import RequestTimes
from remote_server.turns import Steps

Run = Callable[[str, Callable[[], object]], bool]
"""Calls a named part of a turn under the guard. True when that returns something true."""


class Transport(ABC):
    """One tenant's puts and gets over one transport. The loop thread alone uses it."""

    suffix: ClassVar[str] = ""
    """Follows the names of its operations in metrics."""

    @abstractmethod
    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        """Whether `request` is for this transport. Of several the first one has it."""

    @abstractmethod
    def put(
        self,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
        declines: Declined | None,
    ) -> Steps[None] | None:
        """The steps of a put, none of whose blocks is kept if it `declines` them. None: it waits,
        and goes on by itself. Raises `RequestRefused`."""

    @abstractmethod
    def get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Steps[None]:
        """The steps of a get."""

    @property
    def busy(self) -> bool:
        """Puts are on their way, which a drain waits for."""
        return False

    def take_turn(self, run: Run) -> bool:
        """Do what is due in a turn of the loop. True when there is more to do at once."""
        return False
