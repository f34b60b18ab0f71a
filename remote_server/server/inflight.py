"""How much of the memory readers may keep others from: what is being sent to them, or lent."""

from remote_server.errors import RequestRefused
from remote_server.protocol import MAX_MESSAGE_BYTES, ErrorCode
from remote_server.sizes import format_bytes
from remote_server.store.tier import Tier

# One message must be possible, however small the memory. Our client asks within windows of 16 MiB
# over tcp and 64 over shared memory.
LEAST_BYTES = MAX_MESSAGE_BYTES


class InFlight:
    """Checks each message that pins blocks. What it refuses is a miss to its sender, and leaves
    the memory to puts and to other readers."""

    def __init__(self, tier: Tier, max_inflight: int) -> None:
        """`max_inflight` for each client, 0 for the default: half of the memory."""
        budget = tier.stats().budget_bytes
        self._tier = tier
        self.per_client = max_inflight or max(LEAST_BYTES, budget // 2)
        self.in_total = max(LEAST_BYTES, budget - budget // 8)
        # Adding up what is pinned costs microseconds, so not for every message.
        self._stride = budget // 64
        self._not_looked_at = 0

    def check_waiting(self, held: int, more: int) -> None:
        """The same of bytes that are not pinned yet."""
        if held + more > self.per_client:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"{format_bytes(held)} are in flight for this client and {format_bytes(more)} "
                f"would join them, at most {format_bytes(self.per_client)}: ask as blocks land",
            )

    def check(self, held: int, more: int) -> None:
        """Raise `RequestRefused` when a client that holds `held` bytes may not have `more`, which
        are pinned already; then the caller unpins them."""
        self.check_waiting(held, more)
        self._not_looked_at += more
        if self._not_looked_at < self._stride:
            return
        if self._tier.pinned_bytes > self.in_total:
            raise RequestRefused(
                ErrorCode.TOO_MUCH_IN_FLIGHT,
                f"more than {format_bytes(self.in_total)} of this server's memory are in use by "
                "transfers: ask again in a moment",
            )
        self._not_looked_at = 0
