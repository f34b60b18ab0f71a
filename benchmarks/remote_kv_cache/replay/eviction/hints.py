"""Hints for the requests of a trace, as a front end gives them: of a share of them wrong ones."""

import random
from collections.abc import Sequence
from math import inf

from benchmarks.remote_kv_cache.replay.caches.optimum import next_uses
from remote_server.protocol import Hint
from remote_server.traces import Request


def returns_after(requests: Sequence[Request]) -> list[float]:
    """After how many seconds half of each prompt, and more than its first block, is requested
    again; infinity for those that are not. The first block may be a common beginning."""
    after = []
    for request, uses in zip(requests, next_uses(requests), strict=True):
        place = max(1, len(uses) // 2)
        use = uses[place] if place < len(uses) else inf
        after.append(inf if use == inf else requests[int(use)].arrival_s - request.arrival_s)
    return after


def hints(
    requests: Sequence[Request], right: float, within_s: Sequence[float] = (), seed: int = 1
) -> list[Hint]:
    """Whether each prompt returns, and the first of the times `within_s` that is long enough. Each
    hint is right with this chance; a wrong one that a prompt returns has the time of any other."""
    chance = random.Random(seed)
    after = returns_after(requests)
    times = [_within(seconds, within_s) for seconds in after if seconds < inf]
    made = []
    for seconds in after:
        returns = (seconds < inf) == (chance.random() < right)
        if not returns:
            made.append(Hint(False))
        else:
            made.append(
                Hint(True, _within(seconds, within_s) if seconds < inf else chance.choice(times))
            )
    return made


def some_hints(
    requests: Sequence[Request], share: float, within_s: Sequence[float] = (), seed: int = 1
) -> list[Hint | None]:
    """Right hints for this share of the requests, and none for the others."""
    chance = random.Random(seed)
    right = hints(requests, 1.0, within_s)
    return [hint if chance.random() < share else None for hint in right]


def _within(seconds: float, within_s: Sequence[float]) -> float:
    return next((bound for bound in within_s if seconds <= bound), 0.0)
