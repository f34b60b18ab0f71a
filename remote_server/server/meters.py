"""Request metrics, recorded on arrival and on reply.

They cost a request about a microsecond, and a block nothing: the store's own counts of blocks are
read on demand.
"""

from collections import OrderedDict
from collections.abc import Callable, Container
from time import monotonic

import msgspec

from remote_server import protocol
from remote_server.histograms import Histogram, Timings
from remote_server.protocol import (
    Found,
    Get,
    Got,
    KeyState,
    Lookup,
    Put,
    Release,
    Stored,
)

# Namespaces whose requests are counted by name. A deployment has one per model and setting, and
# another after each weight update.
MAX_NAMESPACES = 50

# A namespace without requests for so long can be replaced by a new one.
QUIET_S = 600.0

OTHER = "other"
"""The row of all namespaces without a row of their own."""

# Requests that may be unanswered at a time, far above what clients have. It bounds memory if a
# request is ever not answered.
MAX_OPEN = 65_536

STREAM = "stream"
"""The operation of a streamed get's blocks, after the answer that announces them."""


class Traffic(msgspec.Struct):
    """Keys and bytes of the requests of one namespace, since it has a row."""

    lookup_hit: int = 0
    lookup_pending: int = 0
    lookup_miss: int = 0
    get_hit: int = 0
    get_miss: int = 0
    put_kept: int = 0
    put_present: int = 0
    put_declined: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    last_at: float = 0.0
    """By the server's clock."""


Open = tuple[Histogram, float, Traffic | None]
"""An unanswered request: its histogram, its arrival, and its namespace's row, if it has one."""


class Meters:
    """All counts of requests. The loop thread alone uses it."""

    def __init__(
        self, is_declared: Callable[[str], bool], clock: Callable[[], float] = monotonic
    ) -> None:
        """`is_declared` decides which namespaces may have a row: a client may send any name."""
        self.clock = clock
        self.open: dict[tuple[bytes, int], Open] = {}
        """Requests that have not been answered."""
        self.pending_keys = 0
        """Keys that lookups reported as being written."""
        self._is_declared = is_declared
        self._histograms: dict[str, Histogram] = {}
        self._operations: dict[tuple[type, str], Histogram] = {}
        self.histogram(STREAM)
        # the one without requests for longest is first
        self._traffic: OrderedDict[str, Traffic] = OrderedDict()
        self._other = Traffic()

    def histogram(self, operation: str) -> Histogram:
        found = self._histograms.get(operation)
        if found is None:
            found = self._histograms[operation] = Histogram()
        return found

    def traffic_of(self, namespace: str, now: float) -> Traffic:
        """The row in which requests of `namespace` are counted now."""
        traffic = self._traffic.get(namespace)
        if traffic is None:
            traffic = self._place_for(namespace, now)
        else:
            self._traffic.move_to_end(namespace)
        traffic.last_at = now
        return traffic

    def _place_for(self, namespace: str, now: float) -> Traffic:
        if namespace == OTHER or not self._is_declared(namespace):
            return self._other
        if len(self._traffic) >= MAX_NAMESPACES:
            quiet = next(iter(self._traffic))
            if now - self._traffic[quiet].last_at < QUIET_S:
                return self._other
            del self._traffic[quiet]
        traffic = self._traffic[namespace] = Traffic()
        return traffic

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def operation(self, kind: type, suffix: str = "") -> None:
        """Requests of type `kind` are timed, over the transport with this `suffix`."""
        self._operations[kind, suffix] = self.histogram(f"{_name(kind)}{suffix}")

    def asked(self, client: bytes, request: protocol.Request, suffix: str, now: float) -> None:
        """`request` arrived `now`; it is timed until its answer is passed to ZeroMQ."""
        kind = type(request)
        if kind is Release:  # the only one without an answer
            return
        traffic = None
        if kind in _ABOUT_BLOCKS:
            traffic = self.traffic_of(request.namespace, now)  # type: ignore[union-attr,arg-type]
            if kind is Put:
                traffic.bytes_in += sum(request.lengths)  # type: ignore[union-attr]
        if len(self.open) >= MAX_OPEN:
            del self.open[next(iter(self.open))]
        self.open[client, request.request_id] = self._operations[kind, suffix], now, traffic

    def answered(self, client: bytes, message: protocol.Reply, num_bytes: int) -> None:
        """`message`, with `num_bytes` of blocks, has been passed to ZeroMQ."""
        answered = self.open.pop((client, message.request_id), None)
        if answered is None:  # could not be read, or was answered before
            return
        histogram, began, traffic = answered
        histogram.observe(self.clock() - began)
        if traffic is not None:
            count = _COUNT.get(type(message))
            if count is not None:
                count(traffic, message)
                traffic.bytes_out += num_bytes
            if type(message) is Found:
                self.pending_keys += message.states.count(KeyState.PENDING)

    def stream_begins(self, request: Get, arrived: float) -> Callable[[int | None], None]:
        """The blocks of `request` follow its answer. Call the result with the bytes of each of
        their messages, and with None after the last one."""
        traffic, histogram = self.traffic_of(request.namespace, arrived), self.histogram(STREAM)

        def count(num_bytes: int | None) -> None:
            if num_bytes is None:
                histogram.observe(self.clock() - arrived)
            else:
                traffic.bytes_out += num_bytes

        return count

    def forget(self, clients: Container[bytes]) -> None:
        """Their connections have ended: requests of theirs that were dropped have no answer."""
        for request in [one for one in self.open if one[0] in clients]:
            del self.open[request]

    def timings(self) -> dict[str, Timings]:
        """A copy of each operation's histogram."""
        histograms = sorted(self._histograms.items())
        return {name: one.timings() for name, one in histograms}

    def traffic(self) -> dict[str, Traffic]:
        """A copy of the rows by namespace; with `OTHER` once it was used."""
        copies = {name: msgspec.structs.replace(one) for name, one in self._traffic.items()}
        if self._other.last_at:
            copies[OTHER] = msgspec.structs.replace(self._other)
        return copies


# Tested by type: `isinstance` of a union costs as much as all the rest.
_ABOUT_BLOCKS = frozenset((Put, Lookup, Get))


def _name(kind: type) -> str:
    """`put` of Put: the operation's name on the wire."""
    return str(kind.__struct_config__.tag)  # type: ignore[attr-defined]


def _count_lookup(traffic: Traffic, found: Found) -> None:
    hit, pending = found.states.count(KeyState.READABLE), found.states.count(KeyState.PENDING)
    traffic.lookup_hit += hit
    traffic.lookup_pending += pending
    traffic.lookup_miss += len(found.states) - hit - pending


def _count_get(traffic: Traffic, got: Got) -> None:
    traffic.get_hit += got.hit
    traffic.get_miss += got.miss
    if got.lease is not None:
        traffic.bytes_out += sum(got.lengths)


def _count_put(traffic: Traffic, stored: Stored) -> None:
    declined = sum(stored.declined.values())
    traffic.put_kept += stored.created + stored.forced
    traffic.put_present += stored.existed + stored.duplicate
    traffic.put_declined += declined


_COUNT: dict[type, Callable[..., None]] = {
    Found: _count_lookup,
    Got: _count_get,
    Stored: _count_put,
}
