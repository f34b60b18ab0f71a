"""Requests of a modelled cache, shown to a curve."""

from collections.abc import Sequence

from remote_server.protocol import KeyState, Stretch, WhatIf
from remote_server.store.curve.curve import Curve
from remote_server.store.curve.follower import Follower
from remote_server.traces.model_cache import OneLevel, key_of
from remote_server.traces.trace import Request
from remote_server.turns import to_end

BLOCK = 1000
TOKENS = 512


class Followed:
    """A cache of `capacity` blocks with the curve of what happens in it."""

    def __init__(
        self, capacity: int, policy: str = "learned", ttl_s: float = 0.0, **budgets: int
    ) -> None:
        self.level = OneLevel(capacity, policy)
        self.now = 0.0
        learner = self.level.learner
        self.curve = Curve(
            lambda: self.now, {"memory": capacity * BLOCK, **budgets},
            learner and learner.hazards, ttl_s=ttl_s,
        )  # fmt: skip
        self.follower = Follower(self.curve, lambda: self.now, learner, seed=1)

    def ask(
        self, blocks: Sequence[int], namespace: str = "trace", states: bytes | None = None
    ) -> int:
        """A request for a prompt of these blocks. Returns how many were found."""
        keys = [key_of(block) for block in blocks]
        found, _ = self.level.request(self.now, keys, namespace=namespace)
        if states is None:
            states = bytes([KeyState.READABLE]) * found + bytes(len(keys) - found)
        self.look_up(keys, states, {"memory": found}, namespace)
        return found

    def look_up(
        self, keys: Sequence[bytes], states: bytes, found: dict[str, int], namespace: str = "trace"
    ) -> None:
        chain = [Stretch(len(keys), 0, 0, TOKENS)]
        to_end(self.follower.looked_up(namespace, keys, chain, BLOCK, states, found))

    def replay(self, requests: Sequence[Request]) -> WhatIf:
        for request in requests:
            self.now = request.arrival_s
            if request.blocks:
                self.ask(request.blocks)
        return self.curve.report()
