"""The store against a model of it, in any order of requests, failures and departures."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from news_reader import told_by
from one_by_one import OneByOne
from store_model import BLOCK_BYTES, NUM_SLABS, SLAB_BYTES, Copy, StoreModel

from remote_server import protocol
from remote_server.protocol import Declined, KeyState, PutOutcome, Stretch
from remote_server.server.transfer.copier import is_intact
from remote_server.server.transfer.copies import copy_in
from remote_server.shm.mapping import Arena
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.victims import Rule
from remote_server.store.memory.slabs import slot_bytes_for
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.namespaces import NamespaceInfo
from remote_server.store.puts import Reserved
from remote_server.store.store import Store
from remote_server.store.tier import Offered
from remote_server.turns import to_end

pytest_plugins = ["fuzzing"]

KEYS = [b"%d" % number for number in range(14)]

namespaces = st.sampled_from(sorted(BLOCK_BYTES))
keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)
choices = st.integers(0, 1 << 16)


@dataclass
class Writing:
    """A put that has begun."""

    reserved: Reserved
    copies: list[Copy]
    sources: list[bytes]


@dataclass
class Stale:
    """What a reader remembers of a block that it has pinned no more."""

    copy: Copy
    generation: int
    word: int


class StoreMachine(RuleBasedStateMachine):
    """Each copy written has bytes of its own, so that a stray one is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.arena = Arena(NUM_SLABS * SLAB_BYTES)
        self.learner = self.make_learner()
        memory = MemoryTier(self.arena, SLAB_BYTES, learner=self.learner)
        self.tier = OneByOne(memory)
        self.store = Store(memory, lambda: self.now)
        self.presence = self.store.watch()
        self.known: set[tuple[str, bytes]] = set()
        """What a reader of the news knows to be readable."""
        self.model = StoreModel(by_lru=self.learner is None)
        self.counters: Counter[str] = Counter()
        self.writing: list[Writing] = []
        self.pinned: list[Copy] = []
        self.stale: list[Stale] = []
        self.num_copies = 0

    def make_learner(self) -> Learner | None:
        """None: the memory evicts by LRU."""
        return None

    @initialize(first=st.lists(st.tuples(namespaces, st.integers(1, len(KEYS))), max_size=5))
    def fill(self, first):
        """So that most steps find blocks, and no room."""
        for name, block_bytes in BLOCK_BYTES.items():
            self.store.namespaces.declare(name, NamespaceInfo(block_bytes=block_bytes))
        for name, number in first:
            self.put(name, KEYS[:number], [BLOCK_BYTES[name]] * number, force=False)
            writing = self.writing.pop()
            for copy, data in zip(writing.copies, writing.sources, strict=True):
                assert copy_in([copy.block], [memoryview(data)], self.tier) == [True]
            self.end(writing, [True] * len(writing.copies))

    def teardown(self) -> None:
        if sys.exc_info()[0] is not None:
            return  # a step has failed, and would be hidden by what fails here
        for writing in self.writing:
            self.end(writing, None)
        for copy in self.pinned:
            self.tier.unpin(copy.block)
        for name in BLOCK_BYTES:
            to_end(self.store.unpin(name, None))
        self.store.tier_stack.check()
        self.assert_every_slot_can_be_had()
        self.arena.close()

    def assert_every_slot_can_be_had(self) -> None:
        """Nothing is pinned: each namespace in turn can have all of the memory."""
        assert self.tier.stats().pinned == 0
        for name, block_bytes in BLOCK_BYTES.items():
            number = NUM_SLABS * (SLAB_BYTES // slot_bytes_for(block_bytes))
            names = [b"last %d" % each for each in range(number)]
            sums = [0] * number
            reserved = self.store.puts.begin(
                Offered(name, names, [block_bytes] * number, sums), force=False
            )
            assert len(reserved.blocks) == number, "a slot was lost"
            self.store.puts.end(reserved, [True] * number)
            self.store.tier_stack.check()
        self.store.clear(None)
        stats = self.tier.stats()
        assert (stats.used_bytes, stats.free_slabs) == (0, NUM_SLABS)

    # ── puts ─────────────────────────────────────────────────────────────────────────────

    @rule(
        name=namespaces, keys=keys, cut=st.integers(0, 600), force=st.booleans(),
        drain=st.integers(0, 7),
    )  # fmt: skip
    def begin_put(self, name, keys, cut, force, drain):
        lengths = [BLOCK_BYTES[name] - (cut + 7 * number) % 601 for number in range(len(keys))]
        self.put(name, keys, lengths, force=force, draining=drain == 7)

    def put(
        self, name: str, keys: Sequence[bytes], lengths: Sequence[int], *, force: bool,
        draining: bool = False,
    ) -> None:  # fmt: skip
        sources = [self.fresh(length) for length in lengths]
        sums = protocol.checksums(name, keys, sources)
        outcomes = self.outcomes(name, keys, force=force, draining=draining)
        declines = Declined.DRAINING if draining else None
        reserved = self.store.puts.begin(
            Offered(name, keys, lengths, sums), force=force, declines=declines
        )
        writes = (PutOutcome.CREATED, PutOutcome.FORCED)
        indices = [i for i, outcome in enumerate(outcomes) if outcome in writes]
        gone = [
            place
            for place in self.model.readable
            if self.tier.lookup(*place) is not KeyState.READABLE
        ]
        refused = self.tier.tier.refused
        self.model.made_room(name, len(indices), len(reserved.blocks), gone, refused=refused)
        for index in indices[len(reserved.blocks) :]:
            outcomes[index] = PutOutcome.DECLINED
        assert [*reserved.outcomes] == outcomes
        assert reserved.indices == indices[: len(reserved.blocks)]
        self.count_begin(outcomes, reserved, draining)
        copies = []
        for index, block in zip(reserved.indices, reserved.blocks, strict=True):
            copy = Copy((name, keys[index]), sources[index], block, self.model.tick(), 0)
            copies.append(copy)
            assert (block.key, block.length) == (keys[index], lengths[index])
        self.model.copies += copies
        self.writing.append(Writing(reserved, copies, [sources[i] for i in reserved.indices]))

    def fresh(self, length: int) -> bytes:
        self.num_copies += 1
        return (self.num_copies.to_bytes(4, "big") * 1024)[:length]

    def outcomes(
        self, name: str, keys: Sequence[bytes], *, force: bool, draining: bool
    ) -> list[PutOutcome]:
        """The protocol's outcome for each key, when there is room."""
        found = []
        for index, key in enumerate(keys):
            there = self.state(name, key) is not KeyState.ABSENT
            if key in keys[:index]:
                found.append(PutOutcome.DUPLICATE)
            elif there and not force:
                found.append(PutOutcome.EXISTED)
            elif draining:
                found.append(PutOutcome.DECLINED)
            else:
                found.append(PutOutcome.FORCED if there else PutOutcome.CREATED)
        return found

    def count_begin(self, outcomes: list[PutOutcome], reserved: Reserved, draining: bool) -> None:
        declined = outcomes.count(PutOutcome.DECLINED)
        no_room = Declined.UNLIKELY if self.tier.tier.refused else Declined.NO_SLOT
        reason = Declined.DRAINING if draining else no_room
        assert reserved.reasons == ({reason: declined} if declined else {})
        self.counters["put_total"] += len(outcomes)
        self.counters["put_existed"] += outcomes.count(PutOutcome.EXISTED)
        self.counters["put_duplicate"] += outcomes.count(PutOutcome.DUPLICATE)
        self.counters[f"put_declined_{reason}"] += declined

    @precondition(lambda self: self.writing)
    @rule(choice=choices, damaged=st.sets(st.integers(0, 7), max_size=2))
    def complete_put(self, choice, damaged):
        """Copied as the server does; what lands damaged is noticed by its checksum."""
        writing = self.writing.pop(choice % len(self.writing))
        intact = []
        for number, (copy, data) in enumerate(zip(writing.copies, writing.sources, strict=True)):
            landed = bytes([data[0] ^ 4]) + data[1:] if number in damaged else data
            intact += copy_in([copy.block], [memoryview(landed)], self.tier)
            assert intact[-1] == (number not in damaged)
        self.end(writing, intact)

    @precondition(lambda self: self.writing)
    @rule(choice=choices, reason=st.sampled_from([Declined.CHECKSUM, Declined.WITHDRAWN]))
    def fail_put(self, choice, reason):
        self.end(self.writing.pop(choice % len(self.writing)), None, reason)

    def end(
        self, writing: Writing, intact: list[bool] | None, reason: Declined = Declined.CHECKSUM
    ) -> None:
        verdicts = intact if intact is not None else [False] * len(writing.copies)
        forced = sum(
            ok and writing.reserved.outcomes[index] == PutOutcome.FORCED
            for index, ok in zip(writing.reserved.indices, verdicts, strict=True)
        )
        self.store.puts.end(writing.reserved, intact, reason)
        good = [copy for copy, ok in zip(writing.copies, verdicts, strict=True) if ok]
        for copy, ok in zip(writing.copies, verdicts, strict=True):
            if not ok:
                self.model.fail(copy)
        self.model.publish(good[::-1])
        for index, ok in zip(writing.reserved.indices, verdicts, strict=True):
            assert (writing.reserved.outcomes[index] == PutOutcome.DECLINED) == (not ok)
        self.counters[f"put_declined_{reason}"] += verdicts.count(False)
        self.counters["put_forced"] += forced
        self.counters["put_created"] += len(good) - forced

    # ── gets and pins ────────────────────────────────────────────────────────────────────

    def get(self, name: str, keys: Sequence[bytes]) -> list[Copy]:
        found = to_end(self.store.gets.get(name, keys))
        first = list(dict.fromkeys(keys))
        hits = [key for key in first if (name, key) in self.model.readable]
        copies = [self.model.readable[name, key] for key in hits]
        assert [copy.block for copy in copies] == found.blocks
        assert found.indices == [keys.index(key) for key in hits]
        assert found.miss == len(first) - len(hits)
        assert found.duplicate == len(keys) - len(first)
        self.model.pin(copies[::-1])
        self.counters["get_total"] += len(keys)
        self.counters["get_hit"] += len(hits)
        self.counters["hits_memory"] += len(hits)
        self.counters["get_miss"] += found.miss
        self.counters["get_duplicate"] += found.duplicate
        return copies

    @rule(name=namespaces, keys=keys)
    def pin(self, name, keys):
        self.pinned += self.get(name, keys)

    @precondition(lambda self: self.pinned)
    @rule(choice=choices)
    def unpin(self, choice):
        copy = self.pinned.pop(choice % len(self.pinned))
        self.stale = [*self.stale[-19:], Stale(copy, copy.block.generation, copy.block.word)]
        self.tier.unpin(copy.block)
        self.model.unpin(copy)

    # ── the rest ─────────────────────────────────────────────────────────────────────────

    @rule(name=namespaces, keys=keys)
    def touch(self, name, keys):
        there = [key for key in dict.fromkeys(keys) if (name, key) in self.model.readable]
        assert to_end(self.store.gets.touch(name, keys)) == len(there)
        self.model.use([self.model.readable[name, key] for key in reversed(there)])

    def readable_of(self, name: str, keys: Sequence[bytes] | None) -> list[Copy]:
        there = [key for place, key in self.model.readable if place == name]
        return [
            self.model.readable[name, key]
            for key in (there if keys is None else dict.fromkeys(keys))
            if key in there
        ]

    @rule(name=namespaces, keys=st.one_of(keys, st.none()))
    def keep(self, name, keys):
        copies = self.readable_of(name, keys)
        kept = [copy for copy in copies if self.model.keep(copy)]
        num_bytes = sum(copy.slot_bytes for copy in kept)
        now = (len(kept), num_bytes, len(copies) - len(kept))
        assert to_end(self.store.pin(name, keys)) == now

    @rule(name=namespaces, keys=st.one_of(keys, st.none()))
    def let_go(self, name, keys):
        copies = [copy for copy in self.readable_of(name, keys) if copy.kept]
        num_bytes = sum(copy.slot_bytes for copy in copies)
        assert to_end(self.store.unpin(name, keys)) == (len(copies), num_bytes, 0)
        for copy in copies:
            copy.kept = False
            self.model.unpin(copy)

    @rule(name=namespaces, keys=keys)
    def lookup(self, name, keys, chain=()):
        found = self.store.gets.lookup(name, keys, chain)
        states = [self.state(name, key) for key in keys]
        assert [*found.states] == states
        readable = [state is KeyState.READABLE for state in states]
        assert found.prefix == (readable.index(False) if False in readable else len(keys))
        self.counters["lookup_keys"] += len(keys)
        self.counters["lookup_hits"] += sum(readable)

    @rule(name=namespaces, keys=keys, damaged=st.sets(st.integers(0, 7), max_size=2))
    def verify(self, name, keys, damaged):
        """Damaged in memory, that is: a reader that has it pinned reads it damaged."""
        blocks = self.store.pin_to_verify(name, keys)
        wanted = [key for key in dict.fromkeys(keys) if (name, key) in self.model.readable]
        copies = [self.model.readable[name, key] for key in wanted]
        assert [copy.block for copy in copies] == blocks
        self.model.pin(copies)
        for number, copy in enumerate(copies):
            if number in damaged:
                copy.data = copy.data[:-1] + bytes([copy.data[-1] ^ 128])
                self.tier.view(copy.block)[-1] ^= 128
            intact = is_intact(copy.block, self.tier)
            assert intact == (number not in damaged)
            if not intact:
                self.store.remove_corrupt(copy.block)
                self.model.unreadable(copy.place)
                self.counters["integrity_checksum"] += 1
            self.tier.unpin(copy.block)
            self.model.unpin(copy)

    @precondition(lambda self: self.pinned)
    @rule(choice=choices)
    def remove(self, choice):
        copy = self.pinned[choice % len(self.pinned)]
        current = self.model.readable.get(copy.place) is copy
        assert self.tier.remove(copy.block) == current
        if current:
            self.model.unreadable(copy.place)

    @rule(name=st.one_of(namespaces, st.none()), seldom=st.integers(0, 5))
    def clear(self, name, seldom):
        if seldom == 5:
            removed = self.model.clear(name)
            assert self.store.clear(name) == {"memory": removed}
            self.counters["removed"] += removed

    # ── what holds after every step ──────────────────────────────────────────────────────

    def state(self, name: str, key: bytes) -> KeyState:
        if (name, key) in self.model.readable:
            return KeyState.READABLE
        for copy in self.model.copies:
            if copy.writing and not copy.cleared and copy.place == (name, key):
                return KeyState.PENDING
        return KeyState.ABSENT

    @invariant()
    def the_books_balance(self):
        self.store.tier_stack.check()
        self.model.check()

    @invariant()
    def every_key_is_in_its_state(self):
        for name in BLOCK_BYTES:
            states = [*self.tier.lookup_all(name, KEYS)]
            assert states == [self.state(name, key) for key in KEYS]

    @invariant()
    def whoever_reads_the_news_knows_what_is_readable(self):
        for place, has_come in told_by(self.presence):
            assert has_come != (place in self.known)
            (self.known.add if has_come else self.known.discard)(place)
        assert self.known == self.model.readable.keys()

    @invariant()
    def every_byte_is_as_the_model_has_it(self):
        for copy in self.model.copies:
            if not copy.writing:
                assert self.tier.view(copy.block) == copy.data
                assert self.arena.words[copy.block.word] == copy.block.generation

    @invariant()
    def who_reads_too_late_can_tell(self):
        for stale in self.stale:
            if self.arena.words[stale.word] == stale.generation:
                assert self.tier.view(stale.copy.block) == stale.copy.data

    @invariant()
    def what_it_says_of_itself_is_true(self):
        model, stats = self.model, self.tier.stats()
        assert stats.used_bytes == model.used_bytes
        assert stats.free_slabs == model.free_slabs
        assert stats.blocks == len(model.readable)
        assert stats.pending == sum(c.writing and not c.cleared for c in model.copies)
        assert stats.pinned == sum(c.held for c in model.copies)
        assert stats.kept == sum(c.kept for c in model.copies)
        for name, known in self.store.namespaces.stats().items():
            own = [copy for copy in model.readable.values() if copy.place[0] == name]
            assert known.total.blocks == len(own)
            assert known.total.used_bytes == sum(copy.slot_bytes for copy in own)
        counters = self.store.all_counters()
        expected = {
            **self.counters,
            "hits_memory": self.counters["get_hit"],
            "evicted": model.evicted,
            "slabs_recut": model.slabs_recut,
            "keep_declined": model.keep_declined,
        }  # fmt: skip
        assert {name: n for name, n in counters.items() if n} == {
            name: n for name, n in expected.items() if n
        }


class LearningMachine(StoreMachine):
    """The same with prompts: the memory orders their blocks as the rule does that reigns."""

    def make_learner(self):
        return Learner(lambda: self.now)

    @rule(name=namespaces, prompt=st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    def look_up(self, name, prompt):
        self.now += 3.0
        self.lookup(name, prompt, [Stretch(len(prompt), 0, 0, 16)])

    @rule(which=st.sampled_from(Rule))
    def change_the_rule(self, which):
        self.learner.floor.reign.rule = which


@pytest.mark.parametrize(("machine", "examples"), [(StoreMachine, 60), (LearningMachine, 25)])
def test_the_store_does_what_a_model_of_it_allows(fuzz, machine, examples):
    fuzz.machine(machine, examples=examples, steps=50)
