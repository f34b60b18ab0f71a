"""Blocks, rows, a clock and a hold on the I/O thread for the tests of the client."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_server import PATIENCE_S, Asked, FakeServer, eventually

from remote_server.client import GetOutcome, RemoteClient, SharedRegion
from remote_server.errors import ServerUnavailable
from remote_server.protocol import Stats

NAMESPACE = "ns"
BLOCK_BYTES = 4096


def _patient(name: str, **times: float) -> Any:
    """The method `name` of a client, with these times unless others are given."""
    method = getattr(RemoteClient, name)
    return lambda self, *given, **how: method(self, *given, **{**times, **how})


class PatientClient(RemoteClient):
    """Its requests have as much time as a busy host needs, unless the test gives them less."""

    get = _patient("get", timeout_s=PATIENCE_S, stall_s=PATIENCE_S)
    lookup, put, touch, stats, clear, keep = (
        _patient(name, timeout_s=PATIENCE_S)
        for name in ("lookup", "put", "touch", "stats", "clear", "keep")
    )


class Clock:
    """Time stands still until `advance`, which wakes the clients made with it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_reads = 0
        self.clients: list[RemoteClient] = []

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for client in self.clients:
            wake(client)


def io_threads() -> set[threading.Thread]:
    """The I/O threads of all clients in this process."""
    return {thread for thread in threading.enumerate() if thread.name == "kvferry-client"}


def wake(client: RemoteClient) -> None:
    """Make the I/O thread take a turn. It has nothing to forget."""
    client.forget("a namespace of no test")


def turn(client: RemoteClient) -> None:
    """Let the I/O thread take a whole turn: what it was going to do, it has done, and what comes
    from now on is received at the present time of the clock."""
    client.check()
    client.check()


def wait_for_lanes(client: RemoteClient, clock: Clock | None = None) -> None:
    """Until both are open. On demand they are from the first transfer on."""
    client.put(NAMESPACE, [], []).result(PATIENCE_S)

    def are_open() -> bool:
        if client.lanes.num_open < 2 and clock is not None:
            clock.advance(0.01)  # a pause after others that broke
        return client.lanes.num_open == 2

    eventually(are_open, "its lanes are open")


def transport_of(client: RemoteClient) -> str:
    """The way of its rows now, by the name that the fixture `transport` has for it."""
    return "lanes" if client.lanes.num_open else client.transport


@contextmanager
def io_thread_held(client: RemoteClient, fake: FakeServer) -> Iterator[None]:
    """The client's I/O thread waits in a callback until this block ends."""
    reached, go_on = threading.Event(), threading.Event()
    asked: list[Asked] = []
    former = fake.rules.get(Stats, fake.answer)
    fake.rules[Stats] = asked.append
    future = client.stats(timeout_s=PATIENCE_S)
    eventually(lambda: asked, "the request has arrived")
    fake.rules[Stats] = former
    # Added before the reply is sent, so it runs on the thread that receives the reply.
    future.add_done_callback(lambda _: (reached.set(), go_on.wait(PATIENCE_S)))
    fake.do(lambda: fake.answer(asked[0]))
    assert reached.wait(PATIENCE_S), "the reply was not received"
    try:
        yield
    finally:
        go_on.set()


def key(number: int) -> bytes:
    return b"key-%032d" % number


def block(number: int, length: int = BLOCK_BYTES) -> bytearray:
    """Recognisable bytes: no two numbers share a block."""
    return bytearray((number.to_bytes(8, "big") * (length // 8 + 1))[:length])


class Heap:
    """Memory of this process alone: a fresh bytearray each time."""

    def take(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def around(self, row: memoryview) -> bytes:
        """All of what was taken together with `row`."""
        return bytes(row.obj)


class Shared:
    """Memory that a server on this host can reach: pieces of one region, never the same twice."""

    def __init__(self, num_bytes: int = 96 << 20) -> None:
        self.region = SharedRegion(num_bytes)
        self._taken: list[tuple[int, int]] = []

    def take(self, num_bytes: int) -> memoryview:
        start = self._taken[-1][1] if self._taken else 0
        self._taken.append((start, start + num_bytes))
        assert start + num_bytes <= self.region.num_bytes, "a larger region is needed"
        return self.region.view[start : start + num_bytes]

    def around(self, row: memoryview) -> bytes:
        base, here = (
            ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (self.region.view, row)
        )
        ((start, end),) = [one for one in self._taken if one[0] <= here - base < one[1]]
        return bytes(self.region.view[start:end])


class Memory:
    """Where `rows_of` and `empty_rows` take memory from; a fixture may change it for a test."""

    source: Heap | Shared = Heap()


def rows_of(numbers: range, length: int = BLOCK_BYTES) -> list[memoryview]:
    rows = []
    for number in numbers:
        row = Memory.source.take(length)
        row[:] = block(number, length)
        rows.append(row)
    return rows


PATTERN = 0xA5


def empty_rows(num_rows: int, length: int = BLOCK_BYTES) -> list[memoryview]:
    """Rows full of `PATTERN`, as pieces of one region with a guard between them."""
    region = Memory.source.take(num_rows * (length + 64))
    region[:] = bytes([PATTERN]) * region.nbytes
    return [region[i * (length + 64) : i * (length + 64) + length] for i in range(num_rows)]


def assert_untouched(rows: list[memoryview], but: tuple[int, ...] = ()) -> None:
    """Only the rows in `but`, and nothing around them, may differ from `PATTERN`."""
    if not rows:
        return
    region = bytearray(Memory.source.around(rows[0]))
    length = rows[0].nbytes
    for index in but:
        first = index * (length + 64)
        region[first : first + length] = bytes([PATTERN]) * length
    assert region.count(PATTERN) == len(region), "bytes landed where none should"


def hold_blocks(fake: FakeServer, numbers: range, length: int = BLOCK_BYTES) -> list[bytes]:
    """Let the fake have these blocks; returns their keys."""
    fake.hold(NAMESPACE, {key(number): block(number, length) for number in numbers})
    return [key(number) for number in numbers]


def assert_unavailable(client):
    """Every kind of request ends at once, without a server."""
    keys = [key(0)]
    rows = empty_rows(1)
    got = client.get(NAMESPACE, keys, rows, stall_s=60, timeout_s=60).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.UNAVAILABLE]
    assert isinstance(got.error, ServerUnavailable)
    assert_untouched(rows)
    put = client.put(NAMESPACE, keys, rows_of(range(1)), timeout_s=60).result(PATIENCE_S)
    assert isinstance(put.error, ServerUnavailable)
    for future in (
        client.lookup(NAMESPACE, keys, timeout_s=60),
        client.touch(NAMESPACE, keys, timeout_s=60),
    ):
        assert isinstance(future.exception(PATIENCE_S), ServerUnavailable)


def assert_works(client, fake):
    """What the fake holds is got whole."""
    keys = hold_blocks(fake, range(3))
    rows = empty_rows(3)
    got = client.get(NAMESPACE, keys, rows, stall_s=PATIENCE_S).result(PATIENCE_S)
    assert got.landed == [0, 1, 2]
    assert all(row == block(number) for number, row in enumerate(rows))


def put_and_get_back(client: RemoteClient) -> None:
    """What is put comes back."""
    keys, rows = [key(number) for number in range(3)], empty_rows(3)
    assert client.put(NAMESPACE, keys, rows_of(range(3))).result(PATIENCE_S).error is None
    got = client.get(NAMESPACE, keys, rows, stall_s=60).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.HIT] * 3
    assert [bytes(row) for row in rows] == [bytes(block(number)) for number in range(3)]
