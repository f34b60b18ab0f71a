"""The transport of lanes."""

from collections.abc import Sequence
from functools import partial

from remote_server import protocol
from remote_server.protocol import Declined
from remote_server.server.lanes.get import LaneGet
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.lanes.put import LaneBlocks, LanePuts
from remote_server.server.lanes.room import LaneRoom
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.copier import Copier, Uncopied
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.put import Put, Puts
from remote_server.server.transfer.transport import Run, Transport
from remote_server.turns import Steps


class LaneTransport(Transport):
    """Puts and gets of one tenant on the server's lanes."""

    suffix = "_lane"

    def __init__(
        self, puts: Puts, gets: Gets, copier: Copier, lanes: ServerLanes, tenant: str
    ) -> None:
        budget = puts.store.memory.stats().budget_bytes
        self.coming = Uncopied(budget)
        """The puts on their way."""
        self._puts = puts
        self._gets = gets
        self.lanes = lanes
        self._room = LaneRoom(budget)
        self._lane_puts = LanePuts(puts.store, copier, self.coming, self._room, lanes, tenant)

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return bool(request.lane)

    def put(
        self,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
        declines: Declined | None,
    ) -> Steps[None] | None:
        """None: it waits for room."""
        source = LaneBlocks(self._lane_puts, client, request, payload)
        steps = Put(self._puts, client, request, source, declines=declines).steps()
        go_on_later = self._puts.replies.go_on_later
        waits = source.waits(partial(go_on_later, client, request.request_id, steps))
        return None if waits else steps

    def get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Steps[None]:
        return LaneGet(self._gets, client, request, times, self.lanes).steps()

    @property
    def busy(self) -> bool:
        return bool(self.coming.total)

    def take_turn(self, run: Run) -> bool:
        return self._room.is_waited_for and run("beginning puts", self._room.begin_some)
