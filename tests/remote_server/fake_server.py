"""A server that does as it is told: answers, stays silent, lies, and counts what it was asked.

Its default answers are those of a small honest server, so a test scripts only its one lie:

    fake.rules[Get] = lambda asked: fake.send(asked, got, blocks, b"wrong bytes")

Rules run on the fake's own thread; `do` runs anything else there. `wait_for` is how a test
knows that a request has arrived.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from remote_server import protocol
from remote_server.protocol import (
    Blocks,
    Clear,
    Cleared,
    Error,
    Found,
    Get,
    Got,
    Hello,
    Keep,
    Kept,
    KeyState,
    Lookup,
    Put,
    PutOutcome,
    Stats,
    StatsReply,
    Stored,
    Touch,
    Touched,
    Verified,
    Verify,
    Welcome,
)  # fmt: skip

PATIENCE_S = 5.0  # a test that waits this long has failed


@dataclass
class Asked:
    """One request as it arrived."""

    peer: bytes
    message: Any
    payload: list[bytes]


def eventually(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until `condition` holds and return what it returned."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, f"never happened: {what or condition}"
        time.sleep(0.001)
    return result


class FakeServer:
    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", epoch: str = "epoch-1") -> None:
        self.epoch = epoch
        self.max_keys = protocol.MAX_KEYS_PER_MESSAGE
        self.blocks_per_frame = 1
        self.blocks: dict[tuple[str, bytes], bytes] = {}
        self.namespaces: dict[str, Hello] = {}
        self.rules: dict[type, Callable[[Asked], None]] = {}
        self.asked: list[Asked] = []
        self.failure: BaseException | None = None
        self._gate = threading.Event()
        self._gate.set()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = True
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.rcvhwm = 1
        self._router.rcvbuf = 64 << 10
        self._router.sndhwm = 0
        self._router.router_mandatory = True
        self._bind(endpoint)
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._thread.start()

    def _bind(self, endpoint: str) -> None:
        # A port just left by another fake is free again a moment later.
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._router.bind(endpoint)
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    # ── for tests ────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self._gate.set()
        self._running = False
        self._thread.join(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self._context.destroy(linger=0)

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def silence(self, *kinds: type) -> None:
        """Receive these and never answer."""
        for kind in kinds:
            self.rules[kind] = lambda asked: None

    def behave(self) -> None:
        """Answer everything honestly again."""
        self.rules.clear()

    def stop_reading(self) -> None:
        """Leave requests in the socket, and so in the sender's."""
        self._gate.clear()

    def read_again(self) -> None:
        self._gate.set()

    def do(self, order: Callable[[], None]) -> None:
        """Run `order` on the fake's thread and wait until it has."""
        done = threading.Event()
        self._orders.put(lambda: (order(), done.set()))
        assert done.wait(PATIENCE_S), "the fake server is stuck"

    def all_asked(self, kind: type) -> list[Asked]:
        return [asked for asked in list(self.asked) if isinstance(asked.message, kind)]

    def wait_for(self, kind: type, number: int = 1) -> list[Asked]:
        """The requests of this kind, once there are at least `number`."""

        def enough() -> list[Asked] | None:
            found = self.all_asked(kind)
            return found if len(found) >= number else None

        return eventually(enough, f"{number} × {kind.__name__}")

    def hold(self, namespace: str, blocks: dict[bytes, bytes]) -> None:
        """Have these blocks readable."""
        for key, block in blocks.items():
            self.blocks[namespace, key] = bytes(block)

    # ── sending; on the fake's thread ────────────────────────────────────────────────────

    def send(self, asked: Asked, message: Any, *payload: bytes) -> None:
        self.send_raw(asked, *protocol.encode(message), *payload)

    def send_raw(self, asked: Asked, *frames: bytes) -> None:
        try:
            self._router.send_multipart([asked.peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the client has left, as clients may
                raise

    def blocks_for(self, asked: Asked, indices: list[int], *, more: bool = False) -> list[Any]:
        """The honest Blocks message for these indices, and its payload frames."""
        namespace = asked.message.namespace
        keys = [asked.message.keys[index] for index in indices]
        blocks = [self.blocks[namespace, key] for key in keys]
        per_frame = self.blocks_per_frame
        header = Blocks(
            request_id=asked.message.request_id, epoch=self.epoch, indices=indices,
            lengths=[len(block) for block in blocks],
            checksums=[
                protocol.checksum(namespace, key, block)
                for key, block in zip(keys, blocks, strict=True)
            ],
            more=more, blocks_per_frame=per_frame,
        )  # fmt: skip
        frames = [
            b"".join(blocks[first : first + per_frame])
            for first in range(0, len(blocks), per_frame)
        ]
        return [header, *frames]

    def summary_for(self, asked: Asked) -> Got:
        keys = asked.message.keys
        found = [i for i, key in enumerate(keys) if (asked.message.namespace, key) in self.blocks]
        return Got(
            request_id=asked.message.request_id, epoch=self.epoch, total=len(keys),
            hit=len(found), miss=len(keys) - len(found), duplicate=0, found=found,
        )  # fmt: skip

    # ── its thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as failure:
            self.failure = failure  # `close` raises it where the test can see it

    def _serve(self) -> None:
        while self._running:
            while not self._orders.empty():
                self._orders.get()()
            if not self._gate.is_set():
                time.sleep(0.001)
            elif self._router.poll(1):
                self._receive()

    def _receive(self) -> None:
        peer, magic, header, *payload = self._router.recv_multipart()
        assert magic == protocol.MAGIC
        asked = Asked(peer, protocol.decode_request(header), payload)
        self.asked.append(asked)
        self.rules.get(type(asked.message), self.answer)(asked)

    def answer(self, asked: Asked) -> None:
        """What an honest server says."""
        message = asked.message
        about = {"request_id": message.request_id, "epoch": self.epoch}
        match message:
            case Hello():
                self.namespaces[message.namespace] = message
                self.send(asked, self.welcome(asked))
            case Lookup():
                there = [(message.namespace, key) in self.blocks for key in message.keys]
                states = bytes(KeyState.READABLE if found else KeyState.ABSENT for found in there)
                prefix = len(states) - len(states.lstrip(bytes([KeyState.READABLE])))
                self.send(asked, Found(prefix=prefix, states=states, **about))
            case Put():
                self.answer_put(asked)
            case Get():
                summary = self.summary_for(asked)
                self.send(asked, summary)
                step = self.blocks_per_frame
                for first in range(0, len(summary.found), step):
                    indices = summary.found[first : first + step]
                    more = first + step < len(summary.found)
                    self.send(asked, *self.blocks_for(asked, indices, more=more))
            case Touch():
                self.send(asked, Touched(touched=len(message.keys), **about))
            case Keep():
                kept = len(message.keys or self.blocks)
                self.send(asked, Kept(kept=kept, bytes=0, declined=0, **about))
            case Verify():
                self.send(asked, Verified(removed=0, intact=len(message.keys), **about))
            case Stats():
                stats = StatsReply(
                    server="fake", uptime_s=1.0, tiers={}, namespaces={}, counters={}, **about
                )
                self.send(asked, stats)
            case Clear():
                removed, self.blocks = len(self.blocks), {}
                self.send(asked, Cleared(removed=removed, **about))

    def welcome(self, asked: Asked) -> Welcome:
        return Welcome(
            request_id=asked.message.request_id, epoch=self.epoch,
            protocol=protocol.PROTOCOL_VERSION, server="fake", max_keys=self.max_keys,
            max_frame_bytes=protocol.MAX_FRAME_BYTES,
            max_message_bytes=protocol.MAX_MESSAGE_BYTES, transports=["tcp"],
        )  # fmt: skip

    def answer_put(self, asked: Asked) -> None:
        put = asked.message
        views = [memoryview(frame) for frame in asked.payload]
        outcomes = []
        blocks = [*protocol.split_frames(views, put.lengths, put.blocks_per_frame)]
        if put.checksums:
            assert put.checksums == protocol.checksums(put.namespace, put.keys, blocks)
        for key, block in zip(put.keys, blocks, strict=True):
            existed = (put.namespace, key) in self.blocks
            outcomes.append(PutOutcome.EXISTED if existed else PutOutcome.CREATED)
            self.blocks[put.namespace, key] = bytes(block)
        self.send(
            asked,
            Stored(
                request_id=put.request_id, epoch=self.epoch, total=len(outcomes),
                created=outcomes.count(PutOutcome.CREATED),
                existed=outcomes.count(PutOutcome.EXISTED),
                forced=0, duplicate=0, declined={}, outcomes=bytes(outcomes),
            ),
        )  # fmt: skip

    def refuse(self, code: str) -> Callable[[Asked], None]:
        """A rule that refuses."""
        return lambda asked: self.send(
            asked,
            Error(
                request_id=asked.message.request_id, epoch=self.epoch, code=code, message="no"
            ),
        )  # fmt: skip
