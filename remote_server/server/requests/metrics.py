"""Request metrics, recorded on arrival and on reply.

They cost a request about a microsecond, and a block nothing: the store's own counts of blocks are
read on demand.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import partial
from time import monotonic
from typing import Any

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
from remote_server.server.requests.dispatch import Handlers
from remote_server.server.sending.outgoing import OutgoingMessage
from remote_server.server.transfer.streams import Stream
from remote_server.turns import Steps

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


class MeteredHandlers(Handlers):
    """`Handlers` that time each request from its arrival until its answer is passed to ZeroMQ, and
    the blocks of a streamed get until the last of them is."""

    def __init__(self, meters: Meters, *given: Any, **named: Any) -> None:
        """Takes the arguments of `Handlers` after `meters`."""
        super().__init__(*given, clock=meters.clock, **named)
        self._meters = meters
        answered = (kind for kind in self._by_type if kind is not Release)
        self._operations = {kind: meters.histogram(_name(kind)) for kind in answered}
        self._on_shared: dict[type, Histogram] = {
            kind: meters.histogram(f"{_name(kind)}_shared") for kind in (Put, Get)
        }
        self._on_lanes: dict[type, Histogram] = {
            kind: meters.histogram(f"{_name(kind)}_lane") for kind in (Put, Get)
        }
        self._streams = meters.histogram(STREAM)

    def _rest_of(self, client: bytes, request_id: int, steps: Steps[None]) -> Steps[None]:
        arrived = self._arrived
        for _ in super()._rest_of(client, request_id, steps):
            yield
            self._arrived = arrived

    def _dispatch(
        self, client: bytes, request: protocol.Request, payload: Sequence[memoryview]
    ) -> Steps[None] | None:
        meters, now, kind = self._meters, self._arrived, type(request)
        if kind is not Release:  # the only one without an answer
            traffic = None
            if kind in _ABOUT_BLOCKS:
                traffic = meters.traffic_of(request.namespace, now)  # type: ignore[union-attr,arg-type]
                if kind is Put:
                    traffic.bytes_in += sum(request.lengths)  # type: ignore[union-attr]
            if len(meters.open) >= MAX_OPEN:
                del meters.open[next(iter(meters.open))]
            histograms: dict[type, Histogram] = self._operations
            if kind in self._on_shared:
                if request.lane:  # type: ignore[union-attr]
                    histograms = self._on_lanes
                elif request.shared is not None:  # type: ignore[union-attr]
                    histograms = self._on_shared
            histogram = histograms[kind]
            meters.open[client, request.request_id] = histogram, now, traffic
        return super()._dispatch(client, request, payload)

    def _post(self, client: bytes, message: protocol.Reply, outgoing: OutgoingMessage) -> None:
        super()._post(client, message, outgoing)
        answered = self._meters.open.pop((client, message.request_id), None)
        if answered is None:  # could not be read, or was answered before
            return
        histogram, began, traffic = answered
        histogram.observe(self._clock() - began)
        if traffic is not None:
            count = _COUNT.get(type(message))
            if count is not None:
                count(traffic, message)
                traffic.bytes_out += outgoing.num_bytes
            if type(message) is Found:
                self._meters.pending_keys += message.states.count(KeyState.PENDING)

    def _post_stream(self, client: bytes, request: Get, stream: Stream) -> None:
        traffic = self._meters.traffic_of(request.namespace, self._arrived)
        stream.on_message = partial(self._count_message, traffic, self._arrived)
        super()._post_stream(client, request, stream)

    def _count_message(
        self, traffic: Traffic, began: float, outgoing: OutgoingMessage | None
    ) -> None:
        """The next message of a stream has been taken; None after the last one."""
        if outgoing is None:
            self._streams.observe(self._clock() - began)
        else:
            on_lane = 0 if outgoing.on_lane is None else outgoing.on_lane.num_bytes
            traffic.bytes_out += outgoing.num_bytes + on_lane


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
