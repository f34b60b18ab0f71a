"""The memory tier against a model: a dict, and the right of any unpinned block to vanish."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from one_by_one import OneByOne

from remote_server.protocol import KeyState, Stretch
from remote_server.shm.mapping import Arena
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.victims import Rule
from remote_server.store.memory_tier import MemoryTier
from remote_server.store.slabs import slot_bytes_for

SLAB_BYTES = 4096
NUM_SLABS = 6
BLOCK_BYTES = {"small": 700, "large": 2048, "whole": 4096}  # 5, 2 and 1 to a slab

namespaces = st.sampled_from(sorted(BLOCK_BYTES))
keys = st.integers(0, 15).map(lambda number: b"%d" % number)
choices = st.integers(0, 1 << 16)


class Machine(RuleBasedStateMachine):
    """Each copy written gets a pattern of its own, so that a stray byte is seen."""

    def __init__(self):
        super().__init__()
        self.arena = Arena(NUM_SLABS * SLAB_BYTES)
        self.learner = self.make_learner()
        self.tier = OneByOne(MemoryTier(self.arena, SLAB_BYTES, learner=self.learner))
        self.readable = {}  # what the model expects, until it is evicted
        self.patterns = {}  # block -> bytes it must hold as long as it is writing or readable
        self.writing = []
        self.cleared = set()  # of `writing`: cleared, or begun before a copy that was published
        self.pinned = []
        self.evicted = 0
        self.copies = 0

    def make_learner(self):
        """None: the tier evicts by LRU."""

    def teardown(self):
        for block in self.writing:
            self.tier.fail_put(block)
        for block in self.pinned:
            self.tier.unpin(block)
        self.tier.clear(None)
        self.tier.check()
        assert self.tier.stats().used_bytes == 0
        self.arena.close()

    @rule(namespace=namespaces, key=keys, cut=st.integers(0, 600))
    def begin(self, namespace, key, cut):
        length = BLOCK_BYTES[namespace] - cut
        block = self.tier.begin_put(namespace, key, BLOCK_BYTES[namespace], length, 0)
        if block is None:
            self.assert_no_room(namespace)
            return
        self.copies += 1
        self.patterns[block] = (self.copies.to_bytes(4, "big") * 1024)[:length]
        self.tier.view(block)[:] = self.patterns[block]
        self.writing.append(block)
        self.notice_evictions()

    @rule(choice=choices)
    def complete(self, choice):
        if not self.writing:
            return
        index = choice % len(self.writing)
        block = self.writing.pop(index)
        published = self.tier.complete_put(block)
        assert published == (block not in self.cleared)
        if published:
            place = block.namespace, block.key
            self.cleared |= {b for b in self.writing[:index] if (b.namespace, b.key) == place}
            self.readable[block.namespace, block.key] = block

    @rule(choice=choices)
    def fail(self, choice):
        if self.writing:
            self.tier.fail_put(self.writing.pop(choice % len(self.writing)))

    @rule(namespace=namespaces, key=keys)
    def pin(self, namespace, key):
        block = self.tier.pin(namespace, key)
        assert block is self.readable.get((namespace, key))
        if block is not None:
            self.pinned.append(block)

    @rule(choice=choices)
    def unpin(self, choice):
        if self.pinned:
            self.tier.unpin(self.pinned.pop(choice % len(self.pinned)))

    @rule(namespace=namespaces, key=keys)
    def touch(self, namespace, key):
        assert self.tier.touch(namespace, key) == ((namespace, key) in self.readable)

    @rule(choice=choices)
    def remove(self, choice):
        if self.pinned:
            block = self.pinned[choice % len(self.pinned)]
            current = self.readable.get((block.namespace, block.key)) is block
            assert self.tier.remove(block) == current
            if current:
                del self.readable[block.namespace, block.key]

    @rule(namespace=st.one_of(namespaces, st.none()), seldom=st.integers(0, 3))
    def clear(self, namespace, seldom):
        if seldom:
            return
        gone = [place for place in self.readable if namespace in (None, place[0])]
        assert self.tier.clear(namespace) == len(gone)
        for place in gone:
            del self.readable[place]
        self.cleared |= {b for b in self.writing if namespace in (None, b.namespace)}

    @invariant()
    def accounting_holds(self):
        self.tier.check()

    @invariant()
    def every_byte_is_as_written(self):
        for block in {*self.readable.values(), *self.writing, *self.pinned}:
            assert self.tier.view(block) == self.patterns[block]

    @invariant()
    def every_key_is_in_its_state(self):
        writing = {(b.namespace, b.key) for b in self.writing if b not in self.cleared}
        for namespace in BLOCK_BYTES:
            for number in range(16):
                place = (namespace, b"%d" % number)
                expected = KeyState.ABSENT
                if place in self.readable:
                    expected = KeyState.READABLE
                elif place in writing:
                    expected = KeyState.PENDING
                assert self.tier.lookup(*place) is expected, place

    def notice_evictions(self):
        gone = [p for p in self.readable if self.tier.lookup(*p) is not KeyState.READABLE]
        for place in gone:
            assert self.readable.pop(place) not in self.pinned, "a pinned block was evicted"
        self.evicted += len(gone)
        assert self.tier.counters()["evicted"] == self.evicted

    def assert_no_room(self, namespace):
        """None is the truth only when no free or evictable slot could have served."""
        slot_bytes = slot_bytes_for(BLOCK_BYTES[namespace])
        assert self.tier.stats().free_slabs == 0
        busy = {block.slab for block in (*self.pinned, *self.writing)}
        for slab in self.tier.slabs.slabs:
            if slab.slot_bytes == slot_bytes:
                assert not slab.free
                assert all(block.pins for block in slab.blocks)
            else:
                assert slab in busy


class LearningMachine(Machine):
    """The same with prompts: the tier orders their blocks as the rule does that reigns."""

    def make_learner(self):
        self.now = 0.0
        return Learner(lambda: self.now)

    @rule(namespace=namespaces, prompt=st.lists(keys, min_size=1, max_size=8, unique=True))
    def look_up(self, namespace, prompt):
        self.now += 3.0
        states = self.tier.lookup_all(namespace, prompt)
        chain = [Stretch(len(prompt), 0, 0, 16)]
        self.learner.looked_up(namespace, prompt, chain, len(states) - len(states.lstrip(b"\2")))

    @rule(which=st.sampled_from(Rule))
    def change_the_rule(self, which):
        self.learner.floor.reigning = which


TO_END = settings(max_examples=40, stateful_step_count=60, deadline=None, derandomize=True)
Machine.TestCase.settings = LearningMachine.TestCase.settings = TO_END
TestMemoryTierModel = pytest.mark.filterwarnings("ignore")(Machine.TestCase)
TestLearningMemoryTier = pytest.mark.filterwarnings("ignore")(LearningMachine.TestCase)
