"""Decisions on the next number of users, as functions of the measurements alone.

`qos` searches for the most users whose answers stay within their targets: it adds users until there
are too many, and then bisects between the last number within the targets and the first beyond.
`capacity` searches for the most bytes per second: it adds users until that no longer helps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.traffic.personas import QOS_BY_NAME

MAX_USERS = 500

# qos
UP, DOWN = 1.2, 0.8
OVER, UNDER = 1.1, 0.9
"""In units of the target: beyond these there are too many users, or too few."""

FAR, DOWN_FAR = 2.0, 0.5
"""When both of two looks are this far above the target and no good number of users is known, this
fraction of the users stays. A fifth less would be only the first of many steps."""

STRIKES = 2
"""Consecutive looks above the target that count as too many users."""

STEADY = 3
"""Looks at one number of users that together decide on it."""

ON_TARGET = 1.05
"""A factor around the target, either way: a look within it ends the search."""

NEAR = 1.6
"""A factor around the target, either way: looks within it count in the estimate."""

CONFIRMING = 4
"""Looks at the number found, before it is final."""

WRONG = 1.3
"""A factor around the target, either way: beyond it at the number found, the search continues."""

UP_A_LITTLE = 1.1
"""The increase for a saturation between `UNDER` and the target."""

COOLDOWN = 3
"""Looks that are skipped after users were removed, while their queue drains."""

CLOSE_ENOUGH = 0.05

# capacity
FIRST_STEP, STEP = 0.4, 0.2
MIN_STEP, MAX_STEP = 5, 100
NEW_PEAK = 1.01
FAILURES = 2


def saturation(served_ms: Mapping[str, Sequence[float]]) -> float:
    """The highest P95 of a class, in units of its target. 1 is exactly on target."""
    return max(
        (
            percentile(values, 95) / QOS_BY_NAME[name].target_p95_ms
            for name, values in served_ms.items()
            if values
        ),
        default=0.0,
    )


class QosState(NamedTuple):
    """The state of the search for the most users."""

    users: int
    good: int = 0
    """The most users known to be within the targets."""

    bad: int | None = None
    """The fewest users known to be too many."""

    strikes: int = 0
    looks: tuple[float, ...] = ()
    """The looks at this number of users."""

    cooldown: int = 0
    seen: tuple[tuple[int, float], ...] = ()
    """Users and saturation of every look that counted."""

    confirming: int = 0
    """Remaining looks at the number found."""


class Decision(NamedTuple):
    """`users` from now on; `done` when the search has ended."""

    users: int
    reason: str
    done: bool = False


def decide_qos(state: QosState, saturation: float, target: float) -> tuple[QosState, Decision]:
    """The decision after one look at `state.users` users."""
    if state.cooldown:
        return state._replace(cooldown=state.cooldown - 1), Decision(state.users, "settling")
    state = state._replace(seen=(*state.seen, (state.users, saturation)))
    if not state.confirming:
        state, decision = _search(state, saturation, target)
        if not decision.done or not state.good:
            return state, decision
        found = most_users(state, target)
        state = _moved(state, found)._replace(confirming=CONFIRMING, cooldown=0)
        return state, Decision(found, decision.reason)
    state = state._replace(confirming=state.confirming - 1, looks=(*state.looks, saturation))
    if state.confirming:
        return state, Decision(state.users, "confirming")
    off = statistics.geometric_mean(state.looks) / target
    if off < 1 / WRONG and state.users < MAX_USERS:
        # The cause of the overload is over: the search it misled restarts.
        return _more(state._replace(good=state.users, bad=None, seen=state.seen[-CONFIRMING:]), UP)
    if off > WRONG:
        return _too_many(state._replace(good=state.good if state.good < state.users else 0))
    return state, Decision(most_users(state, target), "confirmed", True)


def _search(state: QosState, saturation: float, target: float) -> tuple[QosState, Decision]:
    """`done` when a number was found, or when none can be."""
    users = state.users
    state = state._replace(looks=(*state.looks, saturation))
    if saturation > OVER * target:
        state = state._replace(strikes=state.strikes + 1)
        if state.strikes < STRIKES:
            return state, Decision(users, "too slow once")
        return _too_many(state, DOWN_FAR if min(state.looks[-STRIKES:]) > FAR * target else DOWN)
    state = state._replace(strikes=0)
    if saturation < UNDER * target:
        return _more(state, UP)
    if len(state.looks) < STEADY:
        return state, Decision(users, "about on target")
    found = statistics.geometric_mean(state.looks) / target
    if found > ON_TARGET:
        return _too_many(state)
    if found < 1 / ON_TARGET:
        return _more(state, UP_A_LITTLE)
    return state._replace(good=max(state.good, users)), Decision(users, "on target", True)


def _more(state: QosState, times: float) -> tuple[QosState, Decision]:
    users = state.users
    state = state._replace(good=max(state.good, users))
    if users >= MAX_USERS:
        return state, Decision(users, "as many as there may be", True)
    if state.bad is not None:
        return _between(state)
    more = min(MAX_USERS, max(users + 1, math.floor(users * times)))
    return _moved(state, more), Decision(more, "more")


def _too_many(state: QosState, times: float = DOWN) -> tuple[QosState, Decision]:
    """Without a known good number of users, continue with `times` as many."""
    users = state.users
    bad = users if state.bad is None else min(state.bad, users)
    # An earlier good look may have been luck.
    state = state._replace(bad=bad, good=min(state.good, bad - 1))
    if bad <= 1:
        return state, Decision(1, "too slow for a single user", True)
    if not state.good:
        fewer = max(1, math.floor(users * times))
        return _moved(state, fewer)._replace(cooldown=COOLDOWN), Decision(fewer, "fewer")
    state, decision = _between(state)
    return state._replace(cooldown=0 if decision.done else COOLDOWN), decision


def _between(state: QosState) -> tuple[QosState, Decision]:
    assert state.bad is not None
    if state.bad - state.good <= max(1, CLOSE_ENOUGH * state.bad):
        return _moved(state, state.good), Decision(state.good, "found", True)
    middle = (state.good + state.bad) // 2
    return _moved(state, middle), Decision(middle, "between")


def _moved(state: QosState, users: int) -> QosState:
    return state._replace(users=users, strikes=0, looks=())


def most_users(state: QosState, target: float) -> int:
    """The result of a search: the users at which the observed saturation crosses the target.

    A single look errs by a tenth or two, so all looks near the target count: a line through their
    logarithms, evaluated within the tried numbers of users. Without two such numbers it is the most
    users within the targets; 0 when a single user was too many.
    """
    near = [
        (math.log(users), math.log(found / target))
        for users, found in state.seen
        if 1 / NEAR <= found / target <= NEAR
    ]
    if not state.good or len({place for place, _ in near}) < 2:
        return state.good
    slope, at_one = statistics.linear_regression(*zip(*near, strict=True))
    if slope <= 0:
        return state.good
    places = [place for place, _ in near]
    crossing = min(max(-at_one / slope, min(places)), max(places))
    return math.floor(math.exp(crossing) + 1e-9)


class CapacityState(NamedTuple):
    """The state of the search for the highest throughput."""

    users: int
    peak: float = 0.0
    peak_users: int = 0
    failures: int = 0


def decide_capacity(state: CapacityState, throughput: float) -> tuple[CapacityState, Decision]:
    """The decision after one look at `state.users` users; `throughput` in any unit."""
    first = not state.peak_users
    if throughput > state.peak * NEW_PEAK or first:
        peak, peak_users, failures = throughput, state.users, 0
        reason = "first" if first else "a new peak"
    else:
        peak, peak_users, failures = state.peak, state.peak_users, state.failures + 1
        reason = "no better"
    if failures >= FAILURES or state.users >= MAX_USERS:
        state = CapacityState(state.users, peak, peak_users, failures)
        return state, Decision(peak_users, reason, True)
    share = FIRST_STEP if first else STEP
    step = min(MAX_STEP, max(MIN_STEP, math.floor(state.users * share)))
    more = min(MAX_USERS, state.users + step)
    return CapacityState(more, peak, peak_users, failures), Decision(more, reason)
