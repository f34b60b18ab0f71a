"""Regions that clients on this host share, and all that ends when the client of one leaves."""

from collections import Counter

from remote_server.errors import RequestRefused
from remote_server.protocol import ErrorCode
from remote_server.server.shm.fills import Fills
from remote_server.server.shm.leases import Leases
from remote_server.shm.mapping import Arena
from remote_server.shm.region import Region


class Regions:
    """The regions that are attached, and all that ends when the client of one leaves."""

    def __init__(self, counters: Counter[str], leases: Leases, fills: Fills, arena: Arena) -> None:
        """`fills` has the puts of regions, each under its region."""
        self.leases = leases
        self.fills = fills
        self.arena = arena
        self._counters = counters
        self._regions: dict[int, Region] = {}

    def __len__(self) -> int:
        return len(self._regions)

    def attached(self, region: Region) -> None:
        self._regions[region.token] = region
        self._counters["regions_attached"] += 1

    def gone(self, region: Region) -> None:
        """Its client has left: end its reads and puts, and unmap its memory."""
        del self._regions[region.token]
        self.leases.end_all(region.token)
        region.live = False
        self.fills.drop(region)  # it is not read after this
        region.end()
        self._counters["regions_gone"] += 1

    def refused(self) -> None:
        self._counters["regions_refused"] += 1

    def displaced(self) -> None:
        """A connection to the local socket had to go for others before it attached a region."""
        self._counters["regions_displaced"] += 1

    def find(self, token: int) -> Region:
        """Raises `RequestRefused`."""
        region = self._regions.get(token)
        if region is None:
            raise RequestRefused(
                ErrorCode.UNKNOWN_REGION,
                "no client with this region is connected to the local socket: attach it",
            )
        return region

    def release(self, lease: int) -> None:
        if not self.leases.release(lease):
            self._counters["releases_unknown"] += 1

    def expire_leases(self) -> None:
        self._counters["leases_expired"] += self.leases.expire()
