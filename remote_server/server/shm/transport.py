"""The transport of shared memory."""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.server.sending.times import RequestTimes
from remote_server.server.shm.endpoint import LocalSocket
from remote_server.server.shm.get import SharedGet
from remote_server.server.shm.put import Rows, SharedPuts
from remote_server.server.shm.regions import Regions
from remote_server.server.transfer.get import Get, Gets
from remote_server.server.transfer.put import Puts, Source
from remote_server.server.transfer.transport import Run, Transport


class ShmTransport(Transport):
    """Puts and gets of one tenant's clients on this host, from and to their `regions`."""

    suffix = "_shared"

    def __init__(self, puts: Puts, gets: Gets, regions: Regions, local: LocalSocket | None) -> None:
        """Clients attach regions at `local`; None where the server has no such socket."""
        super().__init__(puts, gets)
        self.regions = regions
        self.local = local
        self.puts = SharedPuts(puts.store, regions, gets.in_flight)

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return request.shared is not None

    def _source(
        self, client: bytes, request: protocol.Put, payload: Sequence[memoryview]
    ) -> Source:
        assert request.shared is not None
        return Rows(self.puts, request, request.shared)

    def _get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Get:
        assert request.shared is not None
        return SharedGet(self._gets, client, request, request.shared, self.regions)

    @property
    def busy(self) -> bool:
        return self.regions.fills.busy

    def take_turn(self, run: Run) -> bool:
        fills, more = self.regions.fills, False
        if fills.busy:
            more = run("copying", fills.fill_some)
        if self.regions.leases:
            run("ending leases", self.regions.expire_leases)
        return more
