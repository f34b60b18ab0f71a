"""Transport: what carries the blocks of a tenant's puts and gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from remote_server import protocol
from remote_server.protocol import Declined
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.get import Get, Gets
from remote_server.server.transfer.put import Put, Puts, Source
from remote_server.turns import Steps

Run = Callable[[str, Callable[[], object]], bool]
"""Calls a named part of a turn under the guard. True when that returns something true."""


class Transport(ABC):
    """One tenant's puts and gets over one transport. The loop thread alone uses it."""

    suffix: ClassVar[str] = ""
    """Follows the names of its operations in metrics."""

    def __init__(self, puts: Puts, gets: Gets) -> None:
        self._puts = puts
        self._gets = gets

    @abstractmethod
    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        """Whether `request` is for this transport. Of several the first one has it."""

    @abstractmethod
    def _source(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Source:
        """Where the blocks of a put come from."""

    @abstractmethod
    def _get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Get:
        """A get of its kind."""

    def put(
        self,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
        declines: Declined | None,
    ) -> Steps[None] | None:
        """The steps of a put, none of whose blocks is kept if it `declines` them. None: it waits,
        and goes on by itself. Raises `RequestRefused`."""
        source = self._source(client, request, payload)
        steps = Put(self._puts, client, request, source, declines=declines).steps()
        later = partial(self._puts.replies.go_on_later, client, request.request_id, steps)
        return None if source.waits(later) else steps

    def get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Steps[None]:
        """The steps of a get."""
        return self._get(client, request, times).steps()

    @property
    def busy(self) -> bool:
        """Puts are on their way, which a drain waits for."""
        return False

    def take_turn(self, run: Run) -> bool:
        """Do what is due in a turn of the loop. True when there is more to do at once."""
        return False
