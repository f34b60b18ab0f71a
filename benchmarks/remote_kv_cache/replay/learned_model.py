"""A model of a server that learns, behind a pool: the product's own policy on both levels.

A lookup names only what the pool lacks. What the pool serves reaches the server as touches, a key
at most once in `REST_S`, as the connector sends them.
"""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Any

from kv_connector.backfill import REST_S
from remote_server.protocol import Stretch
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.policy import LearnedPolicy
from remote_server.traces import Request
from remote_server.traces.model_cache import NAMESPACE
from remote_server.traces.model_cache import Place as PromptPlace
from remote_server.traces.mooncake import TOKENS_PER_BLOCK


class LearnedLevel:
    """A level of `capacity` blocks under the policy that learns."""

    def __init__(self, capacity: int, learner: Learner) -> None:
        self.capacity = capacity
        self._places: dict[Hashable, PromptPlace] = {}
        self._policy = LearnedPolicy(learner, lambda _, key: self._places.get(key))
        self.declined = 0
        """Blocks that ranked below all that they could replace."""

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def use_all(self, keys: Sequence[Hashable]) -> None:
        """A request read, or touched, those of `keys` that are here: the last of its prompt
        first."""
        used = [self._places[key] for key in keys if key in self._places]
        if used:
            self._policy.use_all(used)

    def put(self, keys: Sequence[Any], *, may_refuse: bool) -> None:
        """Add `keys` of one prompt, which are absent, and evict for them: as many of the first as
        there is room for. With `may_refuse` there is none for what is unlikely to return."""
        if not keys or not self.capacity:
            return
        policy, places = self._policy, self._places
        policy.arrive(NAMESPACE, keys[0], may_refuse=may_refuse)
        room = self.capacity - len(places)
        while room < len(keys) and (victim := policy.victim()) is not None:
            policy.remove(victim)
            del places[victim.key]
            room += 1
        self.declined += max(0, len(keys) - room) if policy.refuses else 0
        policy.arrived()
        new = [PromptPlace(NAMESPACE, key) for key in keys[:room]]
        policy.reserve(new)
        for place in reversed(new):
            places[place.key] = place
            policy.add(place)
            place.pins = 0

    def check(self) -> None:
        """Assert that index and policy agree and that the capacity is kept."""
        assert len(self._places) == len(self._policy) <= self.capacity
        self._policy.check()


class LearnedServer:
    """Memory above disk, as `ServerModel`. It is the `Watch` of its replay as well, because a
    lookup and its time teach the policy."""

    def __init__(self, memory: int, disk: int) -> None:
        self._now = 0.0
        self.learner = Learner(lambda: self._now)
        self.memory = LearnedLevel(memory, self.learner)
        self.disk = LearnedLevel(disk, self.learner)
        self.from_memory = 0
        self.from_disk = 0
        self._served_above: Sequence[bytes] = ()
        self._touched_s: dict[bytes, float] = {}

    # ── as a watch ───────────────────────────────────────────────────────────────────────

    def arrived(self, request: Request, keys: Sequence[bytes], in_pool: int) -> None:
        self._now = request.arrival_s
        self._served_above, lacking = keys[:in_pool], keys[in_pool:]
        if lacking:
            chain = [Stretch(len(lacking), 0, in_pool * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)]
            held = sum(1 for _ in takewhile(self.memory.__contains__, lacking))
            self.learner.looked_up(NAMESPACE, lacking, chain, held)

    def found(self, num_found: int) -> None:
        """The engine has its prompt: what the pool served is touched."""
        last_s, rested_s = self._touched_s.get, self._now - REST_S
        end = first = len(self._served_above)
        while first and last_s(self._served_above[first - 1], -REST_S) <= rested_s:
            first -= 1
        touched = self._served_above[first:end][::-1]
        self._touched_s.update(dict.fromkeys(touched, self._now))
        if touched:
            self.learner.touched(NAMESPACE, touched)
            for level in (self.memory, self.disk):
                level.use_all(touched)

    # ── as a server ──────────────────────────────────────────────────────────────────────

    def holds(self, key: bytes) -> bool:
        """The result of a lookup: on any level."""
        return key in self.memory or key in self.disk

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Read these; returns the present ones."""
        found = [key for key in keys if self.holds(key)]
        missing = [key for key in found if key not in self.memory]
        for level in (self.memory, self.disk):
            level.use_all(found[::-1])
        self._set_places()
        self.memory.put(missing, may_refuse=False)
        self._put_on_disk(found)
        self.from_memory += len(found) - len(missing)
        self.from_disk += len(missing)
        return found

    def put(self, keys: Sequence[bytes]) -> None:
        """Store the keys that are on neither level. The lowest level declines what is unlikely to
        return."""
        new = [key for key in keys if not self.holds(key)]
        self._set_places()
        self.memory.put(new, may_refuse=not self.disk.capacity)
        self._put_on_disk(new)

    def _put_on_disk(self, keys: Sequence[bytes]) -> None:
        self.disk.put([key for key in keys if key not in self.disk], may_refuse=True)

    @property
    def remarks(self) -> dict[str, int]:
        """Blocks of a `Point` that were not kept for another reason than eviction."""
        lowest = self.disk if self.disk.capacity else self.memory
        return {"not put: unlikely": lowest.declined}

    def _set_places(self) -> None:
        self.learner.num_blocks = max(self.memory.capacity, self.disk.capacity)

    def check(self) -> None:
        self.memory.check()
        self.disk.check()
