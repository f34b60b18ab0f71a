"""The transport of lanes."""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.server.lanes.get import LaneGet
from remote_server.server.lanes.lanes import ServerLanes
from remote_server.server.lanes.put import LaneBlocks, LanePuts
from remote_server.server.lanes.room import LaneRoom
from remote_server.server.sending.times import RequestTimes
from remote_server.server.transfer.copier import Copier, Uncopied
from remote_server.server.transfer.get import Get, Gets
from remote_server.server.transfer.put import Puts, Source
from remote_server.server.transfer.transport import Run, Transport


class LaneTransport(Transport):
    """Puts and gets of one tenant on the server's lanes."""

    suffix = "_lane"

    def __init__(
        self, puts: Puts, gets: Gets, copier: Copier, lanes: ServerLanes, tenant: str
    ) -> None:
        super().__init__(puts, gets)
        budget = puts.store.memory.stats().budget_bytes
        self.lanes = lanes
        self.coming = Uncopied(budget)
        """The puts on their way."""
        self._room = LaneRoom(budget)
        self._lane_puts = LanePuts(puts.store, copier, self.coming, self._room, lanes, tenant)

    @property
    def window_bytes(self) -> int:
        """What one client should have under way at most: half of what the puts of all clients have
        room for, so that those of one that is slow leave room, and what may be pinned for the gets
        of one."""
        return min(self._room.most // 2, self._gets.in_flight.per_client)

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return bool(request.lane)

    def _source(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Source:
        return LaneBlocks(self._lane_puts, client, request, payload)

    def _get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Get:
        return LaneGet(self._gets, client, request, times, self.lanes)

    @property
    def busy(self) -> bool:
        return bool(self.coming.total)

    def take_turn(self, run: Run) -> bool:
        return self._room.is_waited_for and run("beginning puts", self._room.begin_some)
