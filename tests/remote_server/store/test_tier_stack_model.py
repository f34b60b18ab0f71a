"""Memory above disk against a model: what is fetched is what was put last, or nothing.

A seed decides the operations and the order in which the disk's threads work.
"""

import random

from disk_faults import FakeDisk, SteppedPool
from disk_helpers import budget_for, stack_of
from one_by_one import OneByOne

from remote_server import protocol
from remote_server.protocol import KeyState
from remote_server.shm.mapping import Arena
from remote_server.store.disk.tier import DiskTier
from remote_server.store.fetches import Fetches
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import BlockState

SIZES = {"small": 1000, "large": 4096}
NUM_KEYS = 24
BUDGET, SEGMENT_BYTES = budget_for(6, 4, 4096)


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.arena = Arena(8 * 4096)
        self.memory = MemoryTier(self.arena, slab_bytes=4096)
        self.pool = SteppedPool(self.rng)
        self.disk = DiskTier(
            FakeDisk(BUDGET, self.rng), [], self.pool, BUDGET, segment_bytes=SEGMENT_BYTES,
            max_writing_bytes=12_000,
        )  # fmt: skip
        self.tier_stack = stack_of(self.memory, self.disk, SIZES.__getitem__)
        self.fetches = Fetches(self.tier_stack)
        self.current: dict[tuple[str, bytes], bytes] = {}
        self.made = 0
        self.served = 0
        self.writing = []
        self.held = []

    def run(self, operations: int) -> None:
        choices = [self.begin, self.publish, self.fetch, self.step, self.let_go, self.clear]
        for _ in range(operations):
            self.rng.choices(choices, [6, 6, 6, 10, 4, 0.2])[0]()
            self.memory.check()
            self.disk.check()
        self.settle()

    def keys(self, count: int) -> tuple[str, list[bytes]]:
        numbers = self.rng.sample(range(NUM_KEYS), count)
        return self.rng.choice([*SIZES]), [b"%d" % number for number in numbers]

    def begin(self) -> None:
        """As a store does it: what is there is not written again, unless forced."""
        namespace, (key,) = self.keys(1)
        if self.tier_stack.lookup_all(namespace, [key])[0] and self.rng.random() < 0.8:
            return
        if any((b.namespace, b.key) == (namespace, key) for b, _ in self.writing):
            return  # which of two is the last is the store's business
        self.made += 1
        data = self.made.to_bytes(4, "big") * self.rng.randrange(1, SIZES[namespace] // 4)
        checksum = protocol.checksum(namespace, key, data)
        memory = OneByOne(self.memory)
        block = memory.begin_put(namespace, key, SIZES[namespace], len(data), checksum)
        if block is not None:
            self.memory.view(block)[:] = data
            self.writing.append((block, data))

    def publish(self) -> None:
        if not self.writing:
            return
        block, data = self.writing.pop(self.rng.randrange(len(self.writing)))
        self.memory.complete_puts([block])
        if block.state is BlockState.READABLE:
            self.current[block.namespace, block.key] = data
            self.tier_stack.published([block])

    def fetch(self) -> None:
        namespace, keys = self.keys(3)

        def fetched(blocks):
            for key, block in zip(keys, blocks, strict=True):
                if block is not None:
                    if block.state is BlockState.READABLE:  # not replaced while it waited
                        assert self.memory.view(block) == self.current[namespace, key]
                    self.held.append(block)
                    self.served += 1

        self.fetches.fetch(namespace, keys, fetched)

    def let_go(self) -> None:
        while self.held:
            self.memory.unpin_all([self.held.pop()])

    def clear(self) -> None:
        namespace = self.rng.choice([*SIZES, None])
        self.memory.clear(namespace)
        self.tier_stack.clear_below(namespace)
        for place in [*self.current]:
            if namespace in (None, place[0]):
                del self.current[place]

    def step(self) -> None:
        for _ in range(self.rng.randrange(3)):
            self.pool.step()
        self.tier_stack.finish_jobs()

    def settle(self) -> None:
        while self.writing:
            self.publish()
        self.let_go()
        for _ in range(10_000):
            self.tier_stack.finish_jobs()
            self.let_go()
            if not self.pool.step() and not self.pool.busy:
                return
        raise AssertionError("it never comes to rest")

    def close(self) -> None:
        assert self.memory.stats().pinned == 0
        assert self.memory.stats().pending == 0
        for namespace in SIZES:  # and at rest, what is announced is there
            for number in range(NUM_KEYS):
                key = b"%d" % number
                state = self.tier_stack.lookup_all(namespace, [key])[0]
                assert state is not KeyState.PENDING
                before = self.served
                found = []
                self.fetches.fetch(namespace, [key], found.append)
                self.settle()
                (block,) = found[0]
                assert (block is not None) == (state == KeyState.READABLE)
                if block is not None:
                    assert self.memory.view(block) == self.current[namespace, key]
                    self.memory.unpin_all([block])
                    self.served = before + 1
        self.memory.check()
        self.disk.check()
        self.arena.close()


def test_what_is_fetched_is_what_was_put_last(pytestconfig):
    served = promoted = 0
    for seed in range(40 if pytestconfig.getoption("--whole") else 10):
        world = World(seed)
        try:
            world.run(250)
            world.close()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        served += world.served
        promoted += world.tier_stack.counters()["disk_promoted"]
    assert served > promoted > 100, "hardly anything was promoted: this tests nothing"
