"""Lookups, touches and gets from all tiers, with their results; many keys in steps."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple, TypeVar

from remote_server.protocol import BlockCopy, Hint, KeyState, Stretch
from remote_server.store.eviction.learner import STRETCH_KEYS
from remote_server.store.memory.slabs import Block
from remote_server.store.stack.fetches import Fetches
from remote_server.store.stack.tier_stack import TierStack
from remote_server.turns import KEYS_PER_STEP, LOOKUP_KEYS_PER_STEP, Steps, parts, to_end

# A stretch counts as STRETCH_KEYS more. What the tiers learn from so few keys takes the loop half a
# millisecond, seldom three, in one step.
SHORT_KEYS = 512

_READABLE = bytes([KeyState.READABLE])

Place = TypeVar("Place")

Check = Callable[[Sequence[Block]], None]
"""Called with the blocks that a step of a get has pinned. An exception from it ends the get."""


class KeyStates(NamedTuple):
    """The state of each key, one byte each, the length of the readable prefix, and the runs of keys
    that are readable only across a network: the first one's index and their number, of each. To
    explain, the chain fields and the copies of each."""

    states: bytes
    prefix: int
    remote: list[int]
    chain: Sequence[Stretch] = ()
    copies: Sequence[list[BlockCopy]] = ()
    to_learn: Steps[None] | None = None
    """For `answered`: what the tiers learn from a short lookup, or how they failed with a long one.
    Run it whole: until its end no put that follows the answer may be served."""


class Pinned(NamedTuple):
    """The blocks that a get can send. `blocks` are pinned for the caller, who unpins each once."""

    indices: list[int]  # into the keys requested; a repeated key has one entry
    blocks: list[Block]
    miss: int
    duplicate: int


class Found(NamedTuple):
    """The blocks that a streamed get can send: each pinned for the caller, or None where it must be
    fetched by its key first."""

    indices: list[int]  # into the keys requested; a repeated key has one entry
    keys: list[bytes]
    blocks: list[Block | None]
    miss: int
    duplicate: int


def _anything(_: Sequence[Block]) -> None:
    pass


def _failed(error: Exception) -> Steps[None]:
    """Work that has failed with `error`, which is raised where it is run."""
    yield from ()
    raise error


class Gets:
    """The lookups, gets and touches of a tenant."""

    def __init__(self, tier_stack: TierStack, fetches: Fetches, counters: Counter[str]) -> None:
        self._memory = tier_stack.memory
        self._tier_stack = tier_stack
        self._fetches = fetches
        self._counters = counters

    def lookup(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch] = (),
        hint: Hint | None = None,
    ) -> KeyStates:  # fmt: skip
        """`lookup_in_steps` and `answered`, at once."""
        found = to_end(self.lookup_in_steps(namespace, keys, chain, hint))
        to_end(self.answered(namespace, keys, chain, found))
        return found

    def _look_up(self, namespace: str, keys: Sequence[bytes]) -> KeyStates:
        self._tier_stack.expire(namespace, keys)
        states, remote = self._tier_stack.look_up(namespace, keys)
        hits = states.count(KeyState.READABLE)
        prefix = len(states) - len(states.lstrip(_READABLE))
        self._counters["lookup_keys"] += len(keys)
        self._counters["lookup_hits"] += hits
        return KeyStates(states, prefix, remote)

    def lookup_in_steps(
        self,
        namespace: str,
        keys: Sequence[bytes],
        chain: Sequence[Stretch] = (),
        hint: Hint | None = None,
        *,
        explain: bool = False,
    ) -> Steps[KeyStates]:
        """The state of each of `keys`; to `explain` with the chain fields and the copies of each.
        Not a use of any block. Few keys in few stretches are one step. `answered` follows unless
        it is to explain."""
        states = b""
        prefix = 0
        remote: list[int] = []
        explained: list[tuple[Stretch, list[BlockCopy]]] = []
        is_long = len(keys) > LOOKUP_KEYS_PER_STEP
        packs = yield from self._tier_stack.expect(namespace, keys, chain)
        for part in parts(keys, KEYS_PER_STEP if explain else LOOKUP_KEYS_PER_STEP):
            if is_long or explain:
                yield
            found = self._look_up(namespace, part)
            if prefix == len(states):  # all before this part is readable
                prefix += found.prefix
            for first, number in zip(found.remote[::2], found.remote[1::2], strict=True):
                remote += (len(states) + first, number)
            states += found.states
            if explain:
                explained += [self._tier_stack.explain(namespace, key) for key in part]
        if is_long or explain:
            yield  # the answer takes a step of its own
        if not explain:
            learning = self._tier_stack.looked_up(namespace, keys, chain, packs, states, hint)
            if len(keys) + len(chain) * STRETCH_KEYS <= SHORT_KEYS:
                return KeyStates(states, prefix, remote, to_learn=learning)
            # Puts may come as soon as it is answered, and the tiers must have learned by then.
            try:
                yield from learning
            except Exception as error:
                return KeyStates(states, prefix, remote, to_learn=_failed(error))
        fields = [each[0] for each in explained]
        return KeyStates(states, prefix, remote, fields, [each[1] for each in explained])

    def answered(
        self, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch], found: KeyStates
    ) -> Steps[None]:
        """A lookup of `keys` was answered with `found`: what need not be done before. No put that
        follows the answer is served before the first step has ended."""
        if found.to_learn is not None:
            to_end(found.to_learn)
        num_near = found.remote[0] if found.remote else len(keys)
        yield from self._tier_stack.answered(namespace, keys, chain, found.states, num_near)

    def locate_in_steps(self, namespace: str, keys: Sequence[bytes]) -> Steps[bytes]:
        """`locate`, for many keys."""
        places = b""
        for part in parts(keys, LOOKUP_KEYS_PER_STEP):
            if places:
                yield
            places += self.locate(namespace, part)
        return places

    def locate(self, namespace: str, keys: Sequence[bytes]) -> bytes:
        """For each of `keys` the place of the first tier that has it, from 1 (`TierStack.names`); 0
        where it is not readable. Not a use of any block, and not counted as a lookup."""
        self._tier_stack.expire(namespace, keys)
        return self._tier_stack.places(namespace, keys)

    def get(self, namespace: str, keys: Sequence[bytes], check: Check = _anything) -> Steps[Pinned]:
        """Pin the blocks of `keys` that are readable in memory, for the caller to unpin."""
        first = first_places(keys)
        if len(first) > KEYS_PER_STEP:
            yield  # `first_places` took a step's time
        pinned: list[Block | None] = []
        try:
            for part in parts([*reversed(first)]):
                if pinned:
                    yield
                self._pin(namespace, part, pinned, self._memory.pin_all, check)
            return self._found_in_memory(keys, first, pinned)
        except BaseException:
            self._unpin(pinned)
            raise

    def fetch(
        self,
        namespace: str,
        keys: Sequence[bytes],
        on_found: Callable[[Pinned], None],
        deadline: float = inf,
    ) -> Steps[Pinned | None]:
        """`get` from all tiers. None when a block must be read from below: then `on_found` is
        called once, later, with all blocks that could be read; the others are counted as missed.
        No client wants a block after `deadline`."""
        if not self._tier_stack.below:
            return (yield from self.get(namespace, keys))
        first = yield from _first_places_in_steps(keys)
        gathering = Gathering(len(first), self._memory.unpin_all)
        last_first = [*reversed(first)]
        try:
            for part in parts(last_first):
                if gathering.num_expected:
                    yield
                self._tier_stack.expire(namespace, part)
                came = gathering.expect(len(part))
                self._fetches.fetch(namespace, part, came, deadline=deadline)
        except BaseException:
            gathering.give_up()
            raise
        if gathering.is_whole:
            return self._found(keys, first, gathering.blocks)
        gathering.when_whole(lambda: on_found(self._found(keys, first, gathering.blocks)))
        return None

    def find(
        self, namespace: str, keys: Sequence[bytes], check: Check = _anything
    ) -> Steps[Pinned | Found]:
        """`get`, when all of it is in memory or nothing is below; else the blocks to stream as they
        come from below. Blocks found count as hits. `check` is called with the blocks that each
        step has pinned; an exception from it ends the get, with nothing pinned."""
        if not self._tier_stack.below:
            return (yield from self.get(namespace, keys, check))
        first = yield from _first_places_in_steps(keys)
        found: list[Block | bool] = []
        try:
            for part in parts([*reversed(first)]):
                if found:
                    yield
                self._pin(namespace, part, found, self._fetches.find, check)
            if True not in found:
                pinned = [block if isinstance(block, Block) else None for block in found]
                return self._found_in_memory(keys, first, pinned)
            if len(found) > KEYS_PER_STEP:
                yield from self._unpin_copies(namespace, first, found)
            return self._found_to_read(keys, first, found)
        except BaseException:
            self._unpin(found)
            raise

    def touch(self, namespace: str, keys: Sequence[bytes]) -> Steps[int]:
        """How many distinct keys were readable, and are the most recently used now. From the last
        key to the first, as `_pin` does."""
        touched: set[bytes] = set()
        is_first = True
        for part in parts([*reversed(keys)]):
            if not is_first:
                yield
            is_first = False
            self._tier_stack.expire(namespace, part)
            touched.update(self._tier_stack.touch(namespace, part))
        return len(touched)

    # ── helpers ──────────────────────────────────────────────────────────────────────────

    def _pin(
        self,
        namespace: str,
        keys: Sequence[bytes],
        pinned: list[Place],
        pin_all: Callable[[str, Sequence[bytes]], Sequence[Place]],
        check: Check,
    ) -> None:
        """Append the results of `pin_all` for `keys` to `pinned`.

        Keys come from the last of a get to the first, so that the head of a prefix is the most
        recently used: without its head the rest of a prefix is worth nothing.
        """
        self._tier_stack.expire(namespace, keys)
        places = pin_all(namespace, keys)
        pinned += places
        check([block for block in places if isinstance(block, Block)])

    def _unpin(self, found: "Sequence[Block | bool | None]") -> None:
        self._memory.unpin_all([block for block in found if isinstance(block, Block)])

    def _unpin_copies(
        self, namespace: str, first: dict[bytes, int], found: list[Block | bool]
    ) -> Steps[None]:
        """Unpin in memory all that a tier below has as well. A later part has shown that it must be
        read, which was not known when the first parts were pinned."""
        last_first = [*reversed(first)]
        for start in range(0, len(found), KEYS_PER_STEP):
            yield
            part = slice(start, start + KEYS_PER_STEP)
            found[part] = self._fetches.unpin_copies(namespace, last_first[part], found[part])

    def _found_to_read(
        self, keys: Sequence[bytes], first: dict[bytes, int], found: list[Block | bool]
    ) -> Found:
        """`found` are those of `first`, from the last to the first; at least one is below."""
        found.reverse()
        places = [
            (index, key, block if isinstance(block, Block) else None)
            for (key, index), block in zip(first.items(), found, strict=True)
            if block
        ]
        miss, duplicate = len(first) - len(places), len(keys) - len(first)
        self._count_get(len(keys), len(places), miss, duplicate)
        indices, wanted, blocks = zip(*places, strict=True)
        return Found([*indices], [*wanted], [*blocks], miss, duplicate)

    def _found_in_memory(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        found = self._found(keys, first, pinned)
        self._tier_stack.hits.in_memory(found.blocks)
        return found

    def _found(
        self, keys: Sequence[bytes], first: dict[bytes, int], pinned: list[Block | None]
    ) -> Pinned:
        """`pinned` are those of `first`, from the last to the first."""
        pinned.reverse()
        blocks = [block for block in pinned if block is not None]
        indices = [*first.values()]
        if len(blocks) < len(pinned):
            indices = [
                index for index, block in zip(indices, pinned, strict=True) if block is not None
            ]
        found = Pinned(
            indices=indices,
            blocks=blocks,
            miss=len(first) - len(blocks),
            duplicate=len(keys) - len(first),
        )
        self._count_get(len(keys), len(blocks), found.miss, found.duplicate)
        return found

    def _count_get(self, total: int, hit: int, miss: int, duplicate: int) -> None:
        self._counters["get_total"] += total
        self._counters["get_hit"] += hit
        self._counters["get_miss"] += miss
        self._counters["get_duplicate"] += duplicate


class Gathering:
    """The blocks that a get requests from all tiers, part by part, until all have arrived."""

    def __init__(self, num_blocks: int, unpin_all: Callable[[Iterable[Block]], None]) -> None:
        self.blocks: list[Block | None] = [None] * num_blocks
        self.num_expected = 0
        self._num_left = num_blocks
        self._unpin_all = unpin_all
        self._is_given_up = False
        self._then: Callable[[], None] | None = None

    @property
    def is_whole(self) -> bool:
        return not self._num_left

    def expect(self, num_blocks: int) -> Callable[[list[Block | None]], None]:
        """The callback that takes the next `num_blocks` when they arrive."""
        start = self.num_expected
        self.num_expected += num_blocks

        def came(blocks: list[Block | None]) -> None:
            if self._is_given_up:
                self._unpin_all([block for block in blocks if block is not None])
                return
            self.blocks[start : start + num_blocks] = blocks
            self._num_left -= num_blocks
            if not self._num_left and self._then is not None:
                self._then()

        return came

    def when_whole(self, then: Callable[[], None]) -> None:
        """Call `then` when the last block has arrived. At least one must be missing."""
        self._then = then

    def give_up(self) -> None:
        """Unpin the blocks that have arrived, and those that will."""
        self._is_given_up = True
        self._unpin_all([block for block in self.blocks if block is not None])


def first_places(keys: Sequence[bytes]) -> dict[bytes, int]:
    """Each distinct key and the index of its first occurrence, in the order requested."""
    places = dict(zip(keys, range(len(keys)), strict=True))
    if len(places) < len(keys):
        places = {}
        for index, key in enumerate(keys):
            places.setdefault(key, index)
    return places


def _first_places_in_steps(keys: Sequence[bytes]) -> Steps[dict[bytes, int]]:
    """The same in steps: 16,384 keys whose hashes are not cached take 3 ms."""
    if len(keys) <= LOOKUP_KEYS_PER_STEP:
        return first_places(keys)
    places: dict[bytes, int] = {}
    for part in parts(range(len(keys)), LOOKUP_KEYS_PER_STEP):
        for index in part:
            places.setdefault(keys[index], index)
        yield
    return places
