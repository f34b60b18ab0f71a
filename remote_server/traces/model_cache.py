"""A cache of one level without bytes: the policy as in a server's memory, and requests that find,
use and put as a client does."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from remote_server.protocol import Hint, Stretch
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.lru import LRU, EvictionPolicy
from remote_server.store.eviction.policy import LearnedPolicy
from remote_server.store.eviction.victims import Rule
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.traces.trace import Request

NAMESPACE = "trace"

RULES: dict[str, Rule | None] = {"learned": None, "learned, no floor": Rule.LEARNED}
"""The policies that learn, and the rule that reigns always."""

POLICIES = ("lru", *RULES)


@dataclass(eq=False, slots=True)
class Place:
    """A block that is resident."""

    namespace: str
    key: bytes
    pins: int = 1
    branch: object = None


@dataclass
class Result:
    """Counts of one replay, in blocks."""

    policy: str
    capacity: int
    requested: int = 0
    found: int = 0
    written: int = 0
    seconds: float = 0.0
    """Of CPU, in the policy and the index."""

    reigned: dict[str, int] = field(default_factory=dict)
    """Requests under each rule."""

    @property
    def found_percent(self) -> float:
        return 100 * self.found / self.requested if self.requested else 0.0

    @property
    def written_percent(self) -> float:
        return 100 * self.written / self.requested if self.requested else 0.0


class Level:
    """`capacity` blocks under a policy, without their bytes. Requests follow each other."""

    def __init__(self, capacity: int) -> None:
        """Least recently used first, until a class below sets another policy."""
        self.capacity = capacity
        self._index: dict[bytes, Place] = {}
        self._policy: EvictionPolicy[Place] = LRU()
        self.declined = 0
        """Blocks that ranked below all that they could replace."""

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def learns(self, learner: Learner) -> None:
        """Evict by what `learner` learns. Before there is any block."""
        self._policy = LearnedPolicy(learner, lambda _, key: self._index.get(key))

    def use_all(self, keys: Sequence[bytes]) -> None:
        """A request read, or touched, those of `keys` that are here: the last of its prompt
        first."""
        if used := [self._index[key] for key in keys if key in self._index]:
            self._policy.use_all(used)

    def bring(self, namespace: str, keys: Sequence[bytes], *, may_refuse: bool) -> int:
        """Add `keys` of one prompt, which are absent, and evict for them: as many of the first as
        there is room for. With `may_refuse` there is none for what is unlikely to return. Returns
        how many were added."""
        if not keys or not self.capacity:
            return 0
        index, policy = self._index, self._policy
        policy.arrive(namespace, keys[0], may_refuse=may_refuse)
        room = self.capacity - len(index)
        while room < len(keys) and (victim := policy.victim()) is not None:
            policy.remove(victim)
            del index[victim.key]
            room += 1
        self.declined += max(0, len(keys) - room) if policy.refuses else 0
        policy.arrived()
        places = [Place(namespace, key) for key in keys[:room]]
        policy.reserve(places)
        for place in reversed(places):
            index[place.key] = place
            policy.add(place)
            place.pins = 0
        return len(places)

    def check(self) -> None:
        """Assert that index and policy agree and that the capacity is kept."""
        assert len(self._index) == len(self._policy) <= self.capacity
        assert all(place in self._policy for place in self._index.values())
        if isinstance(self._policy, LearnedPolicy):
            self._policy.check()


class OneLevel(Level):
    """`capacity` blocks under a policy. Requests follow each other, at times that they bring."""

    def __init__(self, capacity: int, policy: str, block_tokens: int = TOKENS_PER_BLOCK) -> None:
        super().__init__(capacity)
        self.now = 0.0
        self.learner: Learner | None = None
        self._block_tokens = block_tokens
        if policy in RULES:
            self.learner = Learner(lambda: self.now, RULES[policy])
            self.learns(self.learner)

    def request(
        self, now: float, keys: Sequence[bytes], hint: Hint | None = None,
        namespace: str = NAMESPACE, start: int = 0,
    ) -> tuple[int, int]:  # fmt: skip
        """A request for a prompt, whose keys no other namespace has, from its token `start` on.
        Returns how many of its first blocks were found, and how many of the others are written."""
        self.now = now
        index, learner = self._index, self.learner
        found = 0
        for key in keys:
            if key not in index:
                break
            found += 1
        chain = [Stretch(len(keys), 0, start, self._block_tokens)] if keys else []
        if learner is not None:
            learner.looked_up(namespace, keys, chain, found, hint)
        self._policy.use_all([index[key] for key in keys[found - 1 :: -1]] if found else [])
        return found, self._bring(namespace, keys[found:])

    def put(self, now: float, keys: Sequence[bytes], namespace: str = NAMESPACE) -> int:
        """Blocks that no lookup asked for. Returns how many of them are written."""
        self.now = now
        return self._bring(namespace, keys)

    def _bring(self, namespace: str, keys: Sequence[bytes]) -> int:
        new = [key for key in keys if key not in self._index]
        if new and self.learner is not None:
            self.learner.num_blocks = self.capacity
        return self.bring(namespace, new, may_refuse=True)


def key_of(block: int) -> bytes:
    """A key as random as those of an engine."""
    mixed = (block + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835
    return (mixed & (1 << 128) - 1).to_bytes(16, "little")


def replay(
    requests: Sequence[Request], capacity: int, policy: str, hints: Sequence[Hint | None] = ()
) -> Result:
    """What `requests` find. `hints` are theirs; empty for none."""
    level, result = OneLevel(capacity, policy), Result(policy, capacity)
    keys_of = [[key_of(block) for block in request.blocks] for request in requests]
    began = time.process_time()
    all_hints = hints or [None] * len(requests)
    for request, keys, hint in zip(requests, keys_of, all_hints, strict=True):
        found, written = level.request(request.arrival_s, keys, hint)
        result.requested += len(keys)
        result.found += found
        result.written += written
        if level.learner is not None:
            rule = level.learner.rule
            result.reigned[rule] = result.reigned.get(rule, 0) + 1
    result.seconds = time.process_time() - began
    level.check()
    return result
