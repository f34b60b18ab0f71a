"""A model of a server that learns, behind a pool: the product's own policy on both levels.

A lookup names only what the pool lacks. What the pool serves reaches the server as touches, a key
at most once in `REST_S`, as the connector sends them.
"""

from collections.abc import Sequence

from kv_connector.tier.recency import REST_S
from remote_server.traces import Request
from remote_server.traces.model_cache import NAMESPACE
from remote_server.traces.model_levels import TwoLevels
from remote_server.traces.mooncake import TOKENS_PER_BLOCK


class LearnedServer(TwoLevels):
    """Memory above disk, as `ServerModel`. It is the `Watch` of its replay as well, because a
    lookup and its time teach the policy."""

    def __init__(self, memory: int, disk: int) -> None:
        super().__init__(memory, disk)
        self._served_above: Sequence[bytes] = ()
        self._touched_s: dict[bytes, float] = {}

    def arrived(self, request: Request, keys: Sequence[bytes], in_pool: int) -> None:
        self._served_above = keys[:in_pool]
        self.looked_up(request.arrival_s, keys[in_pool:], in_pool * TOKENS_PER_BLOCK)

    def found(self, num_found: int) -> None:
        """The engine has its prompt: what the pool served is touched."""
        last_s, rested_s = self._touched_s.get, self.now - REST_S
        end = first = len(self._served_above)
        while first and last_s(self._served_above[first - 1], -REST_S) <= rested_s:
            first -= 1
        touched = self._served_above[first:end][::-1]
        self._touched_s.update(dict.fromkeys(touched, self.now))
        if touched:
            self.learner.touched(NAMESPACE, touched)
            for level in (self.memory, self.disk):
                level.use_all(touched)
