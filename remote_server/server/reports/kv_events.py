"""KV events of a server: what became readable and what left, published to routers.

The format is that of vLLM's engines, so that a consumer of theirs can follow a server: frames of a
topic, a sequence number of eight bytes, big-endian, and a msgpack array `[time, events]`. The topic
is `kv@SERVER@NAMESPACE`, with `:` in place of `@` in the namespace. Numbers count the batches of
all topics.

A server does not know tokens: an event has the hash of a block and how many tokens it holds. A
router joins it by the hash with the event of the engine that computed the block. The hash is the
last eight bytes of the block hash as a number, as in vLLM by default.

The first batch of a server is `AllBlocksCleared`, and its number is higher than any of an earlier
server. So a subscriber that missed a batch, or a restart, finds a gap in the numbers. The last
`REPLAY_BATCHES` can be replayed: a request of one number on the replay socket is answered with the
batches from there on, or from the oldest that is kept.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from remote_server.errors import ConfigError
from remote_server.server.sending.times import wall_time_s
from remote_server.store.presence import News, Presence

MEDIUM = "STORAGE"
LOCALITY = "REMOTE"

BATCH_BLOCKS = 1000
FLUSH_S = 0.01
"""The longest time by which an event waits for others."""

# Of batches: about 16 MB for each slow subscriber.
SEND_MARK = 256

REPLAY_BATCHES = 10_000
REPLAY_BYTES = 64 << 20
REPLAYED_PER_TURN = 100
MOST_REPLAYS = 16
"""At a time; the oldest one ends for another."""

MOST_REQUEST_BYTES = 1024
"""Of a subscription, and of a frame of a replay request."""

END = (-1).to_bytes(8, "big", signed=True)
"""The number of the message that ends a replay."""


class Event(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """A map with the name of its class in `type`."""


class BlockStored(Event):
    """Blocks of one size are readable on this server. They need not follow each other in a
    prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(Event):
    """Blocks are not readable on this server any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(Event):
    """The server has started: what is known of it is no longer true."""


class EventArray(msgspec.Struct, array_like=True, gc=False):
    """As older vLLM published them, for consumers that know no maps: the name of the class, and the
    fields by their places. What places behind `group_idx` mean differs between consumers."""


class BlockStoredArray(EventArray, tag="BlockStored"):
    """See `BlockStored`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: None
    group_idx: int


class BlockRemovedArray(EventArray, tag="BlockRemoved"):
    """See `BlockRemoved`."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksClearedArray(EventArray, tag="AllBlocksCleared"):
    """See `AllBlocksCleared`."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The third frame of a message."""

    ts: float
    events: Sequence[Event | EventArray]


class Feed:
    """Publishes the news of all tenants. On the loop thread."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        bind: str,
        server: str,
        sources: Mapping[str, Presence],
        clock: Callable[[], float],
        *,
        as_maps: bool = True,
    ) -> None:
        """`sources` are the news of each tenant, by the prefix of its namespaces. Replays have the
        port above that of `bind`, or any where that is any. Events are maps, or else arrays. Raises
        `ConfigError` for an address that cannot be bound."""
        self._server = server
        self._sources = sources
        self._clock = clock
        self._as_maps = as_maps
        self._encode = msgspec.msgpack.Encoder().encode
        self._sequence = _first_number()
        self._flush_at_s = clock()
        self._kept: deque[tuple[int, bytes, bytes]] = deque(maxlen=REPLAY_BATCHES)
        self._kept_bytes = 0
        self._replays: dict[bytes, int] = {}
        """Clients of replays under way, and the number each gets next."""
        self._pub = _bound(context, zmq.PUB, bind)
        try:
            self.replays = _bound(context, zmq.ROUTER, _above(bind))
        except ConfigError:
            self._pub.close()
            raise
        """The socket of replay requests, to be polled by the loop."""
        cleared = AllBlocksCleared() if self._as_maps else AllBlocksClearedArray()
        self._send(f"kv@{server}@", [cleared])

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where subscribers connect, and where they request replays."""
        last = zmq.LAST_ENDPOINT
        return self._pub.getsockopt_string(last), self.replays.getsockopt_string(last)

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to send soon."""
        return bool(self._replays or any(source.news for source in self._sources.values()))

    def take_turn(self) -> bool:
        """Publish what is due. Whether more is to be done at once."""
        now = self._clock()
        if now >= self._flush_at_s:
            self._flush_at_s = now + FLUSH_S
            for prefix, source in self._sources.items():
                if source.news:
                    self._publish(prefix, source.take())
        return self._replay_some()

    def _publish(self, prefix: str, news: Sequence[News]) -> None:
        """In their order in each namespace, about `BATCH_BLOCKS` in a batch."""
        by_namespace: dict[str, list[News]] = {}
        for one in news:
            by_namespace.setdefault(one.namespace, []).append(one)
        for namespace, some in by_namespace.items():
            topic = f"kv@{self._server}@{(prefix + namespace).replace('@', ':')}"
            events, num_blocks = list[Event | EventArray](), 0
            for one in some:
                for first in range(0, len(one.hashes), BATCH_BLOCKS):
                    hashes = one.hashes[first : first + BATCH_BLOCKS]
                    events.append(self._event(one, hashes))
                    num_blocks += len(hashes)
                    if num_blocks >= BATCH_BLOCKS:
                        self._send(topic, events)
                        events, num_blocks = [], 0
            if events:
                self._send(topic, events)

    def _event(self, of: News, hashes: list[int]) -> Event | EventArray:
        if of.has_come:
            return self._stored(hashes, of.tokens, of.group)
        return self._removed(hashes, of.group)

    def _stored(self, blocks: list[int], tokens: int, group: int) -> Event | EventArray:
        no_tokens = list[int]()
        if self._as_maps:
            return BlockStored(
                blocks, None, no_tokens, tokens, None, MEDIUM, None, group, LOCALITY, self._server
            )
        return BlockStoredArray(
            blocks, None, no_tokens, tokens, None, MEDIUM, None, None, group
        )  # fmt: skip

    def _removed(self, blocks: list[int], group: int) -> Event | EventArray:
        if self._as_maps:
            return BlockRemoved(blocks, MEDIUM, group, LOCALITY, self._server)
        return BlockRemovedArray(blocks, MEDIUM, group)

    def _send(self, topic: str, events: Sequence[Event | EventArray]) -> None:
        name, body = topic.encode(), self._encode(Batch(wall_time_s(), events))
        number = self._sequence
        self._sequence += 1
        # Never waits: libzmq drops the message for each subscriber that is `SEND_MARK` behind.
        self._pub.send_multipart([name, number.to_bytes(8, "big"), body])
        if len(self._kept) == self._kept.maxlen:
            self._forget_oldest()
        self._kept.append((number, name, body))
        self._kept_bytes += len(body)
        while self._kept_bytes > REPLAY_BYTES and len(self._kept) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._kept_bytes -= len(self._kept.popleft()[2])

    # ── replays ──────────────────────────────────────────────────────────────────────────

    def take_requests(self) -> None:
        """Begin the replays that are asked for."""
        for _ in range(MOST_REPLAYS):
            try:
                client, *frames = self.replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2 and len(frames[1]) == 8:
                self._replays.pop(client, None)
                self._replays[client] = int.from_bytes(frames[1], "big")
            while len(self._replays) > MOST_REPLAYS:
                del self._replays[next(iter(self._replays))]

    def _replay_some(self) -> bool:
        """Send some of the oldest replay. A client that does not read loses the rest."""
        if not self._replays:
            return False
        client, begin = next(iter(self._replays.items()))
        first = self._kept[0][0] if self._kept else self._sequence
        begin = max(begin, first)
        end = min(begin + REPLAYED_PER_TURN, self._sequence)
        try:
            for at in range(begin - first, end - first):
                number, topic, body = self._kept[at]
                reply = [client, b"", topic, number.to_bytes(8, "big"), body]
                self.replays.send_multipart(reply, zmq.NOBLOCK)
            if end == self._sequence:
                self.replays.send_multipart([client, b"", b"", END, b""], zmq.NOBLOCK)
                del self._replays[client]
            else:
                self._replays[client] = end
        except zmq.ZMQError:  # it has gone, or its queue is full
            del self._replays[client]
        return bool(self._replays)

    def close(self) -> None:
        """Leave both addresses."""
        self._pub.close(linger=0)
        self.replays.close(linger=0)


def _first_number() -> int:
    """Above all of an earlier start, unless the clock was set back meanwhile: milliseconds since
    1970, in each a million batches."""
    return time.time_ns() // 1_000_000 << 20


def _above(address: str) -> str:
    """The address with the next port."""
    host, _, port = address.rpartition(":")
    return address if port == "*" else f"{host}:{int(port) + 1}"


def _bound(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str) -> "zmq.Socket[Any]":
    socket: zmq.Socket[Any] = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = "[" in address
    socket.sndhwm = SEND_MARK
    socket.maxmsgsize = MOST_REQUEST_BYTES
    if kind == zmq.ROUTER:
        socket.router_mandatory = True
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"events: {address!r}: {error}") from error
    return socket
