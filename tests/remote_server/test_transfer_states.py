"""Puts and gets that are cut off in each of their states: nothing stays behind, all is counted."""

from collections.abc import Iterator

import pytest
from dict_tier import DictTier
from handler_bench import HandlerBench
from wire_peer import key

from remote_server import protocol
from remote_server.protocol import Get, GetShared, Hello, Put
from remote_server.store.admission import Admission
from remote_server.store.store import Below
from remote_server.turns import Steps

CLIENT = b"client"
LENGTH = 4096
TOKEN = 7


class Bench(HandlerBench):
    """Handlers above a tier that reads a block when the test lets it. `later` has the steps of
    requests whose blocks were read."""

    def __init__(self) -> None:
        self.slow = DictTier(1000)
        super().__init__([Below(self.slow, Admission())])
        self.later: list[Steps[None]] = []
        self.handlers._later = lambda client, steps: self.later.append(steps)
        self.ask(Hello(request_id=1, protocol=1, namespace="ns", block_bytes=LENGTH))

    def ask(self, request: protocol.Request, *payload: bytes) -> Steps[None] | None:
        """The steps that are left after the first."""
        frames = [*protocol.encode(request), *payload]
        return self.handlers.handle(CLIENT, [memoryview(frame) for frame in frames])

    def put(self, numbers: range) -> None:
        keys = [key(number) for number in numbers]
        put = Put(request_id=2, namespace="ns", keys=keys, lengths=[LENGTH] * len(keys),
                  checksums=[], blocks_per_frame=len(keys))  # fmt: skip
        assert self.ask(put, bytes(LENGTH * len(keys))) is None
        self.read_below()
        self.turn()

    def read_below(self) -> None:
        """The tier below finishes what it was asked for."""
        self.turn()
        self.store.tier_stack.finish_jobs()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.attach(TOKEN)
    bench.put(range(4))
    bench.store.memory.clear(None)  # what is left is below
    yield bench
    bench.settle()
    bench.store.check()
    bench.close()


def pins(bench: Bench) -> int:
    return bench.tier.stats().pinned + bench.tier.stats().pending


def a_get(kind: str) -> protocol.Request:
    keys = [key(number) for number in range(4)]
    if kind == "lease":
        return GetShared(request_id=9, namespace="ns", keys=keys, region=TOKEN)
    return Get(request_id=9, namespace="ns", keys=keys, stream=kind == "stream")


@pytest.mark.parametrize("kind", ["whole", "lease"])
def test_a_get_that_is_dropped_before_the_turn_after_its_read_pins_nothing(bench, kind):
    """The read was complete, and its client had left before the next turn: the pins stayed."""
    assert bench.ask(a_get(kind)) is None
    bench.read_below()
    assert pins(bench) == 4
    (steps,) = bench.later
    steps.close()
    assert pins(bench) == 0
