"""The transport of shared memory."""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.protocol import Declined
from remote_server.server.sending.times import RequestTimes
from remote_server.server.shm.endpoint import LocalSocket
from remote_server.server.shm.get import SharedGet
from remote_server.server.shm.put import Rows, SharedPuts
from remote_server.server.shm.regions import Regions
from remote_server.server.transfer.get import Gets
from remote_server.server.transfer.put import Put, Puts
from remote_server.server.transfer.transport import Run, Transport
from remote_server.turns import Steps


class ShmTransport(Transport):
    """Puts and gets of one tenant's clients on this host, from and to their `regions`."""

    suffix = "_shared"

    def __init__(self, puts: Puts, gets: Gets, regions: Regions, local: LocalSocket | None) -> None:
        """Clients attach regions at `local`; None where the server has no such socket."""
        self.regions = regions
        self.local = local
        self.puts = SharedPuts(puts.store, regions, gets.in_flight)
        self._puts = puts
        self._gets = gets

    def takes(self, request: protocol.Put | protocol.Get) -> bool:
        return request.shared is not None

    def put(
        self,
        client: bytes,
        request: protocol.Put,
        payload: Sequence[memoryview],
        declines: Declined | None,
    ) -> Steps[None]:
        assert request.shared is not None
        source = Rows(self.puts, request, request.shared)
        return Put(self._puts, client, request, source, declines=declines).steps()

    def get(self, client: bytes, request: protocol.Get, times: RequestTimes | None) -> Steps[None]:
        assert request.shared is not None
        return SharedGet(self._gets, client, request, request.shared, self.regions).steps()

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
