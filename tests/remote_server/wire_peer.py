"""A peer that speaks raw frames to a server, and blocks that cannot be mistaken for another."""

import time
from collections.abc import Callable

import zmq

from remote_server import protocol
from remote_server.protocol import Blocks, Get, Got, Hello, Lookup, Put, Stats

BLOCK_BYTES = 4096
PATIENCE_MS = 5_000  # a test that waits this long has failed


def block(number: int, length: int = BLOCK_BYTES) -> bytes:
    """Recognisable bytes: no two numbers share a block."""
    return number.to_bytes(8, "big") * (length // 8) + b"\0" * (length % 8)


def key(number: int) -> bytes:
    return b"key-%032d" % number


class Peer:
    """One DEALER socket. Sends messages or garbage, and reads what comes back, in order."""

    def __init__(self, context: zmq.Context, endpoint: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndtimeo = PATIENCE_MS  # once refused, it never takes a message again
        for name, value in options.items():
            setattr(self.socket, name, value)
        self.socket.connect(endpoint)
        self._last_id = 0

    def next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def send(self, message: protocol.Request, *payload: bytes) -> None:
        self.socket.send_multipart([*protocol.encode(message), *payload])

    def receive(self) -> tuple[protocol.Reply, list[memoryview]]:
        assert self.socket.poll(PATIENCE_MS), "no reply"
        magic, header, *payload = self.socket.recv_multipart()
        assert magic == protocol.MAGIC
        return protocol.decode_reply(header), [memoryview(frame) for frame in payload]

    def ask(self, message: protocol.Request, *payload: bytes):
        self.send(message, *payload)
        reply, _ = self.receive()
        assert reply.request_id == message.request_id
        return reply

    def hello(self, namespace: str = "ns", block_bytes: int = BLOCK_BYTES, **fields):
        return self.ask(
            Hello(
                request_id=self.next_id(),
                protocol=protocol.PROTOCOL_VERSION,
                namespace=namespace,
                block_bytes=block_bytes,
                **fields,
            )
        )

    def put_message(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields):
        blocks = [block(number, length) for number in numbers]
        keys = [key(number) for number in numbers]
        checksums = [protocol.checksum(namespace, k, b) for k, b in zip(keys, blocks, strict=True)]
        fields = {
            "deferred": False, "lengths": [length] * len(keys), "checksums": checksums, **fields
        }  # fmt: skip
        put = Put(request_id=self.next_id(), namespace=namespace, keys=keys, **fields)
        return put, blocks

    def put(self, numbers, namespace="ns", length=BLOCK_BYTES, **fields):
        message, blocks = self.put_message(numbers, namespace, length, **fields)
        return self.ask(message, *blocks)

    def lookup(self, numbers, namespace="ns"):
        keys = [key(number) for number in numbers]
        return self.ask(Lookup(request_id=self.next_id(), namespace=namespace, keys=keys))

    def send_get(self, numbers, namespace="ns", stream=True) -> int:
        keys = [key(number) for number in numbers]
        get = Get(request_id=self.next_id(), namespace=namespace, keys=keys, stream=stream)
        self.send(get)
        return get.request_id

    def read_stream(self, request_id: int) -> tuple[Got, list[tuple[int, bytes]]]:
        """The summary and every (index, block) that follows, as they come."""
        got, _ = self.receive()
        assert isinstance(got, Got)
        assert got.request_id == request_id
        arrived: list[tuple[int, bytes]] = []
        more = bool(got.found)
        while more:
            part, frames = self.receive()
            assert isinstance(part, Blocks)
            assert part.request_id == request_id
            views = protocol.split_frames(frames, part.lengths, part.blocks_per_frame)
            arrived += zip(part.indices, map(bytes, views), strict=True)
            more = part.more
        return got, arrived

    def get(self, numbers, namespace="ns"):
        return self.read_stream(self.send_get(numbers, namespace))

    def stats(self) -> protocol.StatsReply:
        return self.ask(Stats(request_id=self.next_id()))

    def stats_once(self, condition: Callable[[protocol.StatsReply], bool]) -> protocol.StatsReply:
        """Ask until `condition` holds: for what a server notices by itself, a bit later."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"never happened: {stats}"
        return stats
