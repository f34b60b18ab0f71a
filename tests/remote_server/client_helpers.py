"""Blocks, rows and a clock for the tests of the client."""

from fake_server import FakeServer

from remote_server.client import RemoteClient

NAMESPACE = "ns"
BLOCK_BYTES = 4096


class Clock:
    """Time stands still until `advance`, which lets the clients made with it look again."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clients: list[RemoteClient] = []

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for client in self.clients:
            client._loop.mailbox.wake()


def key(number: int) -> bytes:
    return b"key-%032d" % number


def block(number: int, length: int = BLOCK_BYTES) -> bytearray:
    """Recognisable bytes: no two numbers share a block."""
    return bytearray((number.to_bytes(8, "big") * (length // 8 + 1))[:length])


def rows_of(numbers: range, length: int = BLOCK_BYTES) -> list[memoryview]:
    return [memoryview(block(number, length)) for number in numbers]


PATTERN = 0xA5


def empty_rows(num_rows: int, length: int = BLOCK_BYTES) -> list[memoryview]:
    """Rows full of `PATTERN`, as pieces of one region with a guard between them."""
    region = memoryview(bytearray([PATTERN]) * (num_rows * (length + 64)))
    return [region[i * (length + 64) : i * (length + 64) + length] for i in range(num_rows)]


def assert_untouched(rows: list[memoryview], but: tuple[int, ...] = ()) -> None:
    """Only the rows in `but`, and nothing around them, may differ from `PATTERN`."""
    if not rows:
        return
    region = bytearray(rows[0].obj)
    length = rows[0].nbytes
    for index in but:
        first = index * (length + 64)
        region[first : first + length] = bytes([PATTERN]) * length
    assert region.count(PATTERN) == len(region), "bytes landed where none should"


def hold_blocks(fake: FakeServer, numbers: range, length: int = BLOCK_BYTES) -> list[bytes]:
    """Let the fake have these blocks; returns their keys."""
    fake.hold(NAMESPACE, {key(number): block(number, length) for number in numbers})
    return [key(number) for number in numbers]
