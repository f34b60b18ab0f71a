"""The wait of a request for a level below the engine: one rule for lookups, loads, the pool's rows
and the bucket.

A request that waits for `w` seconds and then computes after all has lost `w` of the time that
computing takes, `C`. So it waits at most for a share of `C`,

    max(floor, min(patience * C, max_wait))

and no fault of a cache, of whatever kind, makes it slower by more than that share. The time that a
reply takes, by those that came, is not counted: a cache that is slow but answers is used, where
that is faster than computing. The floor is for requests whose `C` is so short that a
share of it is no round trip. The share is one for a request: what it has waited for a lookup is not
left for its load.
"""

from dataclasses import dataclass

from kv_connector.config import RemoteConfig
from kv_connector.tier.speeds import Chunk, EngineSpeed, LinkSpeed

PRIOR_COMPUTE_S = 3.0
"""Taken for the time to compute a prompt where neither the engine's speed nor its model is known.
It errs to waiting: 0.3 s are lost at most once, and seconds may be saved."""

# The floor is so many round trips, within these limits: the reply comes behind those of others, and
# the threads of a busy host wait for a core.
ROUND_TRIPS = 8
LEAST_FLOOR_S, MOST_FLOOR_S = 0.02, 0.1

# A deadline at the end of a step would be detected one step later.
SHARE_OF_A_STEP = 0.8

# Upper limit for long steps: a server that does not reply for a second is away.
LONGEST_STEP_S = 1.0


@dataclass(frozen=True)
class Patience:
    """The waits of requests, by the speeds of now. Only the scheduler thread uses it."""

    config: RemoteConfig
    engine: EngineSpeed
    link: LinkSpeed

    @property
    def floor_s(self) -> float:
        """The shortest wait: a few round trips, and most of a step, because an earlier reply could
        not be used."""
        trip_s = self.link.reply_s
        trips_s = MOST_FLOOR_S if trip_s is None else ROUND_TRIPS * trip_s
        step_s = min(SHARE_OF_A_STEP * self.engine.step_s, LONGEST_STEP_S)
        return max(LEAST_FLOOR_S, min(trips_s, MOST_FLOOR_S), step_s)

    @property
    def longest_s(self) -> float:
        """The longest wait of any request."""
        return self.config.max_wait_ms / 1000

    def compute_s(self, num_tokens: int, position: int = 0) -> float:
        """How long the engine takes from now on to compute tokens behind `position` others."""
        compute_s = self.engine.compute_s(Chunk(num_tokens, position))
        return PRIOR_COMPUTE_S if compute_s is None else compute_s

    def wait_s(self, compute_s: float = PRIOR_COMPUTE_S) -> float:
        """How long a request may wait in vain, in all, for what it would compute in `compute_s`.
        The end of a wait shows at the end of a step, so as many steps as fit in are waited for."""
        wait_s = min(self.config.patience * compute_s, self.longest_s)
        step_s = min(self.engine.step_s, LONGEST_STEP_S)
        if step_s > 0:
            wait_s = (wait_s // step_s - 1 + SHARE_OF_A_STEP) * step_s
        return max(self.floor_s, wait_s)

    def reply_s(self, compute_s: float = PRIOR_COMPUTE_S) -> float:
        """How long it waits for a reply before that wait begins to be in vain: as long as a reply
        takes. 0 where a lookup and a load would take longer than computing by their replies alone:
        of such a server nothing is expected."""
        usual_s, reply_s = self.link.usual_reply_s, self.link.reply_s
        if usual_s is None or reply_s is None or 2 * usual_s >= compute_s:
            return 0.0
        return reply_s
