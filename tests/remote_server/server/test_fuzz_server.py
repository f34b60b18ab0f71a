"""Whatever a client sends: one answer, never an internal error, and nothing is left behind."""

from collections import Counter
from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from handler_bench import REGION_BYTES, HandlerBench
from hypothesis import given
from hypothesis import strategies as st
from mutations import Step, programs, raw_messages, spoil
from shared_messages import SharedPut, kind_of, shared_get, shared_put

from remote_server import protocol
from remote_server.errors import RemoteProtocolError
from remote_server.protocol import (
    Blocks,
    Clear,
    Error,
    Get,
    Got,
    Hello,
    Keep,
    Leased,
    Lookup,
    Put,
    Record,
    Release,
    Stats,
    Touch,
    Verify,
)

pytest_plugins = ["fuzzing"]

BLOCK_BYTES = {"ns": 600, "large": 5000, "slab": 16384}
NAMESPACES = ("ns", "ns", "large", "large", "slab", "nobody's")
CLIENTS = (b"client 1", b"client 2")
TOKEN = 77
TICKETS = 4
OFFSETS = (0, 1, 4096, REGION_BYTES - 600, REGION_BYTES - 1, REGION_BYTES, 1 << 62)

numbers = st.lists(st.integers(0, 9), min_size=1, max_size=6)
small = st.integers(0, 1 << 16)


class Say(NamedTuple):
    """A message, nearly right when `program` is short."""

    client: bytes
    kind: str
    namespace: str
    numbers: list[int]
    a: int
    b: int
    program: list[Step]


class Raw(NamedTuple):
    client: bytes
    frames: list[bytes]


class Do(NamedTuple):
    what: str
    a: int


KINDS = (
    "hello", "lookup", "put", "put", "put", "get", "get", "touch", "verify", "stats", "clear",
    "put_shared", "put_shared", "get_shared", "get_shared", "release", "keep",
    "record",
)  # fmt: skip
clients = st.sampled_from(CLIENTS)
says = st.builds(
    Say, clients, st.sampled_from(KINDS), st.sampled_from(NAMESPACES),
    numbers, small, small, st.one_of(st.just([]), st.just([]), programs),
)  # fmt: skip
ACTS = ("turn", "turn", "full", "gone", "time", "detach", "attach", "drain")
does = st.builds(Do, st.sampled_from(ACTS), small)
scripts = st.lists(
    st.one_of(says, says, says, says, st.builds(Raw, clients, raw_messages), does, does),
    min_size=6, max_size=30,
)  # fmt: skip


def key(number: int) -> bytes:
    return b"key %d" % number


def data(number: int, length: int, version: int) -> bytes:
    return bytes([number, version % 7]) * (length // 2) + b"\1" * (length % 2)


class Conversation:
    """One server, and the messages that were sent to it."""

    def __init__(self) -> None:
        self.bench = HandlerBench()
        self.bench.attach(TOKEN)
        self.request_id = 0
        self.leases: list[int] = []
        self.expected: Counter[bytes] = Counter()
        self.asked: dict[int, list[protocol.Request]] = {}
        for namespace in ("ns", "large"):
            for kind in ("hello", "put"):
                say = Say(CLIENTS[0], kind, namespace, [0, 1, 2, 3], 1, 1, [])
                self.hear(CLIENTS[0], self.build(say))
        self.bench.turn()

    # ── saying ───────────────────────────────────────────────────────────────────────────

    def build(self, say: Say) -> list[bytes]:
        """An honest message, with its payload."""
        self.request_id += 1
        about = {"request_id": self.request_id, "namespace": say.namespace}
        keys = [key(number) for number in say.numbers]
        # Half of them are one binary.
        named = {**about, "keys": keys, "key_bytes": len(key(0)) * (say.b // 2 % 2)}
        block_bytes = BLOCK_BYTES.get(say.namespace, 100)
        lengths = [max(1, block_bytes - say.a % 9 * number) for number in say.numbers]
        if lengths and say.a % 13 == 12:
            lengths[-1] = 0
        blocks = [data(n, length, say.b) for n, length in zip(say.numbers, lengths, strict=True)]
        sums = protocol.checksums(say.namespace, keys, blocks)
        payload: list[bytes] = []
        match say.kind:
            case "hello":
                message: protocol.Request = Hello(protocol=2, block_bytes=block_bytes, **about)
            case "lookup":
                message = Lookup(**named)
            case "touch":
                message = Touch(**named)
            case "keep":
                message = Keep(keep=bool(say.b % 4), **(named if say.a % 3 else about))
            case "verify":
                message = Verify(**named)
            case "record":
                message = Record(request_id=self.request_id, after=say.a if say.b % 4 else None)
            case "stats":
                message = Stats(request_id=self.request_id)
            case "clear":
                message = Clear(
                    request_id=self.request_id, namespace=say.namespace if say.a % 3 else None
                )
            case "get":
                message = Get(stream=bool(say.a % 2), **named)
            case "get_shared":
                release = self.leases[: say.b % 3] if say.b % 4 == 0 else []
                message = shared_get(
                    region=TOKEN, checked=bool(say.a % 4), release=release, **named
                )
            case "release":
                lease = self.leases[say.a % len(self.leases)] if self.leases else say.a
                message = Release(request_id=self.request_id, lease=lease)
            case "put":
                per_frame = 1 + say.a % 3
                payload = [
                    b"".join(blocks[first : first + per_frame])
                    for first in range(0, len(blocks), per_frame)
                ]
                message = Put(
                    lengths=lengths, checksums=sums, blocks_per_frame=per_frame,
                    deferred=bool(say.b % 2), force=bool(say.b % 3 == 0), **named,
                )  # fmt: skip
            case _:
                message = self.put_shared(say, keys, lengths, sums, blocks, about)
        return [*protocol.encode(message), *payload]

    def put_shared(self, say, keys, lengths, sums, blocks, about) -> Put:
        """Its rows lie side by side, and the last one sometimes where it should not."""
        offsets, at = [], say.a % 100
        for block in blocks:
            offsets.append(at)
            if at + len(block) <= REGION_BYTES and self.bench.region is not None:
                self.bench.write_row(at, block)
            at += len(block)
        if offsets and say.b % 5 == 0:
            offsets[-1] = OFFSETS[say.a % len(OFFSETS)]
        ticket, value = say.b % TICKETS, 1 + say.b
        if self.bench.region is not None:
            self.bench.set_ticket(ticket, value if say.a % 5 else 0)
        return shared_put(
            keys=keys, region=TOKEN, offsets=offsets, lengths=lengths,
            checksums=sums if say.a % 4 else [], ticket=ticket, ticket_value=value,
            force=bool(say.b % 3 == 0), **about,
        )  # fmt: skip

    def expect(self, client: bytes, frames: list[bytes]) -> protocol.Request | None:
        """What the server will find in them. From now on an answer is due."""
        request = request_in(frames)
        if request is not None:
            self.asked.setdefault(request.request_id, []).append(request)
        if not isinstance(request, Release):
            self.expected[client] += 1
        return request

    def hear(self, client: bytes, frames: list[bytes]) -> None:
        """The server handles it; when it refuses at once, nothing has changed."""
        bench, request = self.bench, self.expect(client, frames)
        before, known = bench.changes(), len(bench.send_queues.replies)
        bench.handle(client, frames)
        if kind_of(request) is SharedPut and reaches_outside(request):
            assert isinstance(bench.send_queues.replies[-1][1], Error), "read outside the region"
        for _, reply in bench.send_queues.replies[known:]:
            if isinstance(reply, Error):
                assert bench.changes() == before, reply
            if isinstance(reply, Got) and reply.lease is not None and reply.lease.number:
                self.leases.append(reply.lease.number)
                self.check_lease(reply, reply.lease)
        if request is None:
            assert isinstance(bench.send_queues.replies[-1][1], Error), "nonsense was understood"
        bench.store.tier_stack.check()

    def step(self, number: int) -> None:
        """So many steps of what waits; here nothing does."""

    def do(self, what: str, a: int) -> None:
        bench, client = self.bench, CLIENTS[a % 2]
        match what:
            case "turn":
                bench.turn()
            case "full":
                bench.router.full ^= {client}
            case "gone":
                bench.router.gone ^= {client}
            case "time":
                bench.now += a % 12
                bench.regions.expire_leases()
            case "drain":
                bench.handlers.draining = not bench.handlers.draining
            case "detach":
                bench.detach()
            case "attach" if bench.region is None:
                bench.attach(TOKEN)
        bench.store.tier_stack.check()

    # ── what came of it ──────────────────────────────────────────────────────────────────

    def check_lease(self, got: Got, leased: Leased) -> None:
        """Just granted: the words are right and the bytes are those of the keys."""
        (*_, request) = self.asked[got.request_id]
        assert isinstance(request, Get)
        assert request.shared is not None
        whole = self.bench.arena.view
        for number, position in enumerate(got.found):
            offset, length = leased.offsets[number], got.lengths[number]
            word = (leased.words[number] - self.bench.arena.words_offset) // 8
            assert self.bench.arena.words[word] == leased.generations[number]
            if got.checksums:
                found = whole[offset : offset + length]
                key = request.keys[position]
                checksum = protocol.checksum(request.namespace, key, found)
                assert checksum == got.checksums[number]

    def check_sent(self) -> None:
        """Every block sent is what its header announces, and a block of the key asked for."""
        for _, (_, header, *frames) in self.bench.router.sent:
            reply = protocol.decode_reply(header)
            requests = self.asked.get(reply.request_id, [])
            if not isinstance(reply, Got | Blocks) or len(requests) != 1:
                assert not frames or len(requests) > 1
                continue
            (request,) = requests
            assert isinstance(request, Get)
            indices = reply.indices if isinstance(reply, Blocks) else reply.found
            if isinstance(reply, Got) and request.stream:
                assert not frames
                continue
            views = [memoryview(frame) for frame in frames]
            found = protocol.split_frames(views, reply.lengths, reply.blocks_per_frame)
            for index, block, expected in zip(indices, found, reply.checksums, strict=True):
                key = request.keys[index]
                assert protocol.checksum(request.namespace, key, block) == expected

    def leave(self) -> None:
        """Both clients ask, read nothing of it, and go."""
        for client in CLIENTS:
            for a in (1, 1, 0):
                self.hear(client, self.build(Say(client, "get", "ns", [0, 1, 2, 3], a, 0, [])))
        self.bench.router.full |= {CLIENTS[0]}
        self.bench.send_queues.send_some()
        self.bench.router.gone |= {*CLIENTS}

    def end(self) -> None:
        bench = self.bench
        bench.settle()
        replies = Counter(client for client, _ in bench.send_queues.replies)
        assert replies == self.expected, "not one reply for each request"
        answered = Counter(reply.request_id for _, reply in bench.send_queues.replies)
        for number, requests in self.asked.items():
            due = sum(not isinstance(request, Release) for request in requests)
            assert answered[number] >= due, "a request was not answered by its number"
        self.check_sent()
        bench.detach()
        stats = bench.tier.stats()
        assert (stats.pinned, stats.pending) == (stats.kept, 0)
        assert (len(bench.leases), bench.fills.num_waiting) == (0, 0)
        bench.store.tier_stack.check()
        assert "refused_internal" not in bench.store.counters


def reaches_outside(put: Put) -> bool:
    assert put.shared is not None
    offsets = put.shared.offsets
    ends = [offset + length for offset, length in zip(offsets, put.lengths, strict=False)]
    return len(offsets) != len(put.lengths) or max(ends, default=0) > REGION_BYTES


def request_in(frames: list[bytes]) -> protocol.Request | None:
    """What an honest reader sees in it; None for what no client may send."""
    if len(frames) < 2 or frames[0] != protocol.MAGIC:
        return None
    try:
        request = protocol.decode_request(frames[1])
    except RemoteProtocolError:
        return None
    return request if isinstance(request, Put) or len(frames) == 2 else None


def converse(conversation: Conversation, script, leave: bool, numbers: Iterable[int]) -> None:
    """With so many steps behind each act."""
    try:
        for act, number in zip(script, numbers, strict=False):
            match act:
                case Say():
                    frames = spoil(conversation.build(act), act.program)
                    conversation.hear(act.client, frames)
                case Raw(client, frames):
                    conversation.hear(client, frames)
                case Do(what, a):
                    conversation.do(what, a)
            conversation.step(number)
        if leave:
            conversation.leave()
        conversation.end()
    finally:
        conversation.bench.close()


@given(scripts, st.booleans())
def converse_at_once(script, leave):
    converse(Conversation(), script, leave, repeat(0))


def test_whatever_is_said_to_a_server_is_answered_once_and_leaves_nothing_behind(fuzz):
    fuzz.run(converse_at_once, examples=80)
