"""The scripted server: a ROUTER on a thread of its own that answers as a test prescribes.

Contract:

- Without a script, every answer is that of a small honest server. A test scripts only its one lie:

      fake.rules[Get] = lambda asked: fake.send(asked, got, blocks, b"wrong bytes")

- `rules` run on the fake's thread, and so do the functions given to `do`. `send`, `send_raw` and
  `answer` belong to that thread.
- `asked` holds every request in the order of arrival. `wait_for` returns when one has arrived.
- `lie` answers one kind of request with spoiled or invented frames.
- With `lanes`, it offers as many (`fake_lanes.py`). Blocks that `send` is given for a get on a lane
  go there, and those of a put are taken from there.
- With `near`, the fake announces a local socket, leases blocks from an arena and copies from the
  region that a client attached. `local_rule` answers there, on another thread.
- A rule that raises ends the fake; `close` raises its exception again.
"""

import contextlib
import mmap
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import zmq
from descriptors import memfd
from fake_lanes import FakeLanes, frames_of
from msgspec.structs import replace
from shared_messages import kind_of

from remote_server import protocol
from remote_server.protocol import (
    Attach,
    Attached,
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
    Leased,
    Locate,
    Located,
    Lookup,
    NotAttached,
    OpenLane,
    Put,
    PutOutcome,
    Record,
    Recorded,
    Release,
    Stats,
    StatsReply,
    Stored,
    Touch,
    Touched,
    Verified,
    Verify,
    Welcome,
)  # fmt: skip

if TYPE_CHECKING:
    from mutations import Step

PATIENCE_S = 30.0  # a test that waits this long has failed

ARENA_BYTES = 64 << 20  # of which next to nothing is ever touched
NUM_SLOTS = 64
SLOT_BYTES = 8192
WORDS = NUM_SLOTS * SLOT_BYTES
"""Where the generation words begin."""

Frames = list[bytes]

Lies: TypeAlias = "Sequence[tuple[int, list[Step]] | Frames]"
"""Raw frames, or the number of an honest message and what to do to it."""

Exchange = tuple["Asked", list[Frames]]
"""A request, and the frames of the honest answer to it."""


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
    max_lanes = 0
    """How many lanes each offers that a test makes without a number."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        epoch: str = "epoch-1",
        *,
        near: bool = False,
        lanes: int = 0,
    ) -> None:
        self.near = near
        self.max_lanes = lanes or self.max_lanes
        self.lanes = FakeLanes() if self.max_lanes else None
        self.epoch = epoch
        self.max_keys = protocol.MAX_KEYS_PER_MESSAGE
        self.blocks_per_frame = 1
        self.blocks: dict[tuple[str, bytes], bytes] = {}
        self.namespaces: dict[str, Hello] = {}
        self.rules: dict[type, Callable[[Asked], None]] = {}
        self.asked: list[Asked] = []
        self.failure: BaseException | None = None
        self._recorded: list[Frames] | None = None
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
        self._open_local_socket()
        self._thread.start()

    def _open_local_socket(self) -> None:
        self.local_socket = f"kvferry-test-{secrets.token_hex(8)}"
        self.local_secret = b""
        self.arena_fd = memfd(ARENA_BYTES)
        self.arena = mmap.mmap(self.arena_fd, ARENA_BYTES)
        self.words = memoryview(self.arena)[WORDS:].cast("Q")
        self.slots: dict[tuple[str, bytes], int] = {}
        self.token = 77
        self.attaches: list[Attach] = []
        self.connections: list[socket.socket] = []
        self.region: mmap.mmap | None = None
        self.tickets: memoryview | None = None
        self.local_rule: Callable[[socket.socket, Attach, list[int]], None] = self.attach
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.local_socket}")
        self._listener.listen(8)
        self._local = threading.Thread(target=self._serve_local, name="fake-local", daemon=True)
        self._local.start()

    def _bind(self, endpoint: str) -> None:
        # A port just left by another fake is free again a moment later.
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._router.bind(endpoint)
                return
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    # ── for tests ────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        self.hang_up()
        if self.lanes is not None:
            self.lanes.close()
        if self._listener.fileno() >= 0:
            # Closing alone would not wake the thread that waits for the next connection.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._local.join(PATIENCE_S)
        self._gate.set()
        self._running = False
        self._thread.join(PATIENCE_S)
        self._release_memory()
        if self.failure is not None:
            raise self.failure
        self._context.destroy(linger=0)

    def _release_memory(self) -> None:
        """Other tests count descriptors and maps."""
        self.words.release()
        self.arena.close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1
        self.forget_region()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lie(
        self,
        kind: type,
        lies: Lies,
        *,
        honest_in_the_end: bool,
        meddle: Callable[[], None] = lambda: None,
    ) -> list[Exchange]:
        """From now on answer requests of this kind with `lies`; returns them as they come in.

        `meddle` runs when the honest answer is known and nothing was sent.
        """
        exchanges: list[Exchange] = []

        def rule(asked: Asked) -> None:
            honest = self.honest_answer(asked)
            exchanges.append((asked, honest))
            meddle()
            self._send_lies(asked, honest, lies)
            for frames in honest if honest_in_the_end else ():
                self.send_raw(asked, *frames)

        self.rules[kind] = rule
        return exchanges

    def lie_again(self, exchanges: list[Exchange], lies: Lies) -> None:
        """Answer again what has been answered, or given up: first wrongly, then honestly."""

        def send() -> None:
            for asked, honest in exchanges:
                self._send_lies(asked, honest, lies)
                for frames in honest:
                    self.send_raw(asked, *frames)

        self.do(send)

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
        return [asked for asked in list(self.asked) if kind_of(asked.message) is kind]

    def wait_for(self, kind: type, number: int = 1) -> list[Asked]:
        """The requests of this kind, once there are at least `number`."""

        def enough() -> list[Asked] | None:
            found = self.all_asked(kind)
            return found if len(found) >= number else None

        return eventually(enough, f"{number} × {kind.__name__}")

    def hold(self, namespace: str, blocks: Mapping[bytes, memoryview | bytes]) -> None:
        """Have these blocks readable."""
        for key, block in blocks.items():
            self.blocks[namespace, key] = bytes(block)

    # ── sending; on the fake's thread ────────────────────────────────────────────────────

    def send(self, asked: Asked, message: Any, *payload: bytes) -> None:
        number = getattr(asked.message, "lane", 0)
        if not number or not isinstance(message, Blocks):
            self.send_raw(asked, *protocol.encode(message), *payload)
            return
        assert self.lanes is not None
        header = replace(message, lane=number, checksums=[], blocks_per_frame=1)
        self.send_raw(asked, *protocol.encode(header))
        blocks = [*zip(payload, message.checksums, strict=True)]
        with contextlib.suppress(KeyError):  # it has ended
            lane = self.lanes.of(asked.peer, number)
            lane.send(frames_of(message.request_id, blocks), self.lanes.damage)

    def send_raw(self, asked: Asked, *frames: bytes) -> None:
        if self._recorded is not None:
            self._recorded.append([*frames])
            return
        try:
            self._router.send_multipart([asked.peer, *frames])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the client has left, as clients may
                raise

    def honest_answer(self, asked: Asked) -> list[Frames]:
        """The messages of `answer`, not sent."""
        recorded: list[Frames] = []
        self._recorded = recorded
        try:
            self.answer(asked)
        finally:
            self._recorded = None
        return recorded

    def _send_lies(self, asked: Asked, honest: list[Frames], lies: Lies) -> None:
        from mutations import spoil  # imports hypothesis, which takes a third of a second

        for lie in lies:
            if isinstance(lie, tuple):
                if not honest:
                    continue
                number, program = lie
                lie = spoil(honest[number % len(honest)], program)
            if lie:
                self.send_raw(asked, *lie)

    def blocks_for(self, asked: Asked, indices: list[int], *, more: bool = False) -> list[Any]:
        """The honest Blocks message for these indices, and its payload frames."""
        namespace = asked.message.namespace
        keys = [asked.message.keys[index] for index in indices]
        blocks = [self.blocks[namespace, key] for key in keys]
        per_frame = self.blocks_per_frame
        header = Blocks(
            request_id=asked.message.request_id, epoch=self.epoch, indices=indices,
            lengths=[len(block) for block in blocks],
            checksums=protocol.checksums(namespace, keys, blocks), more=more,
            blocks_per_frame=per_frame,
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
        self.rules.get(kind_of(asked.message), self.answer)(asked)

    def answer(self, asked: Asked) -> None:
        """Send the replies of an honest server."""
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
            case Put(shared=None):
                self.answer_put(asked)
            case Put():
                self.send(asked, self.stored_for(asked))
            case Get(shared=terms) if terms is not None:
                self.send(asked, self.leased_for(asked))
            case Get():
                summary = self.summary_for(asked)
                self.send(asked, summary)
                step = self.blocks_per_frame
                for first in range(0, len(summary.found), step):
                    indices = summary.found[first : first + step]
                    more = first + step < len(summary.found)
                    self.send(asked, *self.blocks_for(asked, indices, more=more))
            case Locate():
                self.send(asked, Located(tiers=["memory"], namespaces={}, **about))
            case Record():
                self.send(asked, Recorded(recording=1, now_s=0.0, last=0, **about))
            case Touch():
                self.send(asked, Touched(touched=len(message.keys), **about))
            case Keep():
                kept = len(message.keys or self.blocks)
                self.send(asked, Kept(kept=kept, bytes=0, declined=0, **about))
            case Verify():
                self.send(asked, Verified(removed=0, intact=len(message.keys), **about))
            case Stats():
                nothing: dict[str, Any] = {"tiers": {}, "namespaces": {}, "counters": {}}
                stats = StatsReply(server="fake", uptime_s=1, protocol=2, **nothing, **about)
                self.send(asked, stats)
            case Clear():
                removed, self.blocks = len(self.blocks), {}
                self.send(asked, Cleared(removed={"memory": removed}, **about))
            case OpenLane():
                assert self.lanes is not None
                self.send(asked, self.lanes.offer(asked.peer, **about))
            case Release():
                pass

    def welcome(self, asked: Asked) -> Welcome:
        return Welcome(
            request_id=asked.message.request_id, epoch=self.epoch,
            protocol=protocol.PROTOCOL_VERSION, server="fake", max_keys=self.max_keys,
            max_frame_bytes=protocol.MAX_FRAME_BYTES,
            max_message_bytes=protocol.MAX_MESSAGE_BYTES, transports=["tcp"],
            local_socket=self.local_socket if self.near else "",
            local_secret=self.local_secret, max_lanes=self.max_lanes,
        )  # fmt: skip

    def answer_put(self, asked: Asked) -> None:
        try:
            blocks = self._blocks_of(asked)
        except (KeyError, ConnectionError):
            return  # its lane ended
        self.send(asked, self._keep(asked, blocks))

    def _keep(self, asked: Asked, blocks: Sequence[memoryview | bytes]) -> Stored:
        put, outcomes = asked.message, []
        for key, block in zip(put.keys, blocks, strict=True):
            existed = (put.namespace, key) in self.blocks
            outcomes.append(PutOutcome.EXISTED if existed else PutOutcome.CREATED)
            self.hold(put.namespace, {key: block})
        return self.stored(asked, outcomes)

    def stored(self, asked: Asked, outcomes: list[PutOutcome], reason: str = "no_slot") -> Stored:
        """The answer to a put. `reason` is that of all who are declined."""
        declined = outcomes.count(PutOutcome.DECLINED)
        return Stored(
            request_id=asked.message.request_id, epoch=self.epoch, total=len(outcomes),
            created=outcomes.count(PutOutcome.CREATED), existed=outcomes.count(PutOutcome.EXISTED),
            forced=outcomes.count(PutOutcome.FORCED),
            duplicate=outcomes.count(PutOutcome.DUPLICATE),
            declined={reason: declined} if declined else {}, outcomes=bytes(outcomes),
        )  # fmt: skip

    def _blocks_of(self, asked: Asked) -> list[memoryview]:
        """The blocks of a put, checked. Raises `KeyError` or `ConnectionError` without its lane."""
        put = asked.message
        if put.lane:
            assert self.lanes is not None
            assert not asked.payload and not put.checksums
            came = self.lanes.of(asked.peer, put.lane).take(put.request_id, len(put.keys))
            blocks = [memoryview(block) for block, _ in came]
            checksums = [checksum for _, checksum in came] if put.checked else []
        else:
            views = [memoryview(frame) for frame in asked.payload]
            blocks = [*protocol.split_frames(views, put.lengths, put.blocks_per_frame)]
            checksums = put.checksums
        if checksums:
            assert checksums == protocol.checksums(put.namespace, put.keys, blocks)
        return blocks

    def refuse(self, code: str) -> Callable[[Asked], None]:
        """A rule that refuses."""
        return lambda asked: self.send(
            asked,
            Error(
                request_id=asked.message.request_id, epoch=self.epoch, code=code, message="no"
            ),
        )  # fmt: skip

    def forget_region(self) -> None:
        """Unmap what a client offered."""
        if self.region is not None and self.tickets is not None:
            self.region.close()
            tickets: Any = self.tickets.obj
            self.tickets.release()
            tickets.close()
            self.region = self.tickets = None

    # ── the local socket ─────────────────────────────────────────────────────────────────

    def hang_up(self) -> None:
        """End every local connection, as a server does when it dies."""
        while self.connections:
            self.connections.pop().close()

    def _serve_local(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            data, files, _, _ = socket.recv_fds(connection, 4096, 4)
            message = protocol.decode_local(data)
            self.connections.append(connection)
            self.attaches.append(message)
            self.local_rule(connection, message, list(files))
            for fd in files:
                os.close(fd)

    def attach(self, connection: socket.socket, message: Attach, files: list[int]) -> None:
        """Map the region and lend the arena, as an honest server does."""
        self.forget_region()
        self.region = mmap.mmap(files[0], message.region_bytes, prot=mmap.PROT_READ)
        tickets = mmap.mmap(files[1], protocol.MAX_TICKETS * 8, prot=mmap.PROT_READ)
        self.tickets = memoryview(tickets).cast("Q")
        self.say(connection, self.attached(), [self.arena_fd])

    def attached(self) -> Attached:
        return Attached(epoch=self.epoch, region=self.token, arena_bytes=ARENA_BYTES)

    def say(self, connection: socket.socket, message: object, files: list[int]) -> None:
        socket.send_fds(connection, [protocol.encode_local(message)], files)

    def refuse_attach(self, reason: str) -> None:
        self.local_rule = lambda connection, message, files: self.say(
            connection, NotAttached(reason=reason), []
        )

    def stored_for(self, asked: Asked) -> Stored:
        """Copy the rows, look at the ticket, keep what still counts."""
        put = asked.message
        assert self.region is not None and self.tickets is not None
        rows = put.shared
        spans = zip(rows.offsets, put.lengths, strict=True)
        blocks = [self.region[offset : offset + length] for offset, length in spans]
        if self.tickets[rows.ticket] != rows.ticket_value:
            return self.stored(asked, [PutOutcome.DECLINED] * len(blocks), "withdrawn")
        if put.checksums:
            assert protocol.checksums(put.namespace, put.keys, blocks) == put.checksums
        return self._keep(asked, blocks)

    def leased_for(self, asked: Asked) -> Got:
        """The honest answer: every block it holds, each in a slot of its own."""
        get = asked.message
        found = [i for i, key in enumerate(get.keys) if (get.namespace, key) in self.blocks]
        keys = [get.keys[i] for i in found]
        blocks = [self.blocks[get.namespace, key] for key in keys]
        slots = [self._slot(get.namespace, key) for key in keys]
        for slot, block in zip(slots, blocks, strict=True):
            self.fill(slot, block, 1000 + slot)
        checksums = protocol.checksums(get.namespace, keys, blocks)
        lease = Leased(
            number=get.request_id + 10**6, lease_ms=10_000,
            offsets=[slot * SLOT_BYTES for slot in slots],
            words=[WORDS + 8 * slot for slot in slots],
            generations=[1000 + slot for slot in slots],
        )  # fmt: skip
        return Got(
            request_id=get.request_id, epoch=self.epoch, total=len(get.keys), hit=len(found),
            miss=len(get.keys) - len(found), duplicate=0, found=found,
            lengths=[len(block) for block in blocks],
            checksums=checksums if get.shared.checked else [], lease=lease,
        )  # fmt: skip

    def _slot(self, namespace: str, key: bytes) -> int:
        # Every other slot, so that no test relies on blocks being neighbours.
        return self.slots.setdefault((namespace, key), 2 * len(self.slots) % NUM_SLOTS)

    def fill(self, slot: int, block: bytes, generation: int) -> None:
        """Put other bytes into a slot, as when its block was evicted."""
        self.words[slot] = 0
        self.arena[slot * SLOT_BYTES : slot * SLOT_BYTES + len(block)] = bytes(block)
        self.words[slot] = generation
