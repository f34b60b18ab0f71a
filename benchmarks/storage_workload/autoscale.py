"""How many users next? Decisions only: what was measured goes in, what to do comes out.

`qos` looks for the most users whose answers stay within their targets: it adds users until there
are too many, and then halves what lies between the last number that was well and the first that
was not. `capacity` looks for the most bytes per second: it adds users until that no longer helps.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.personas import QOS_BY_NAME

MAX_USERS = 500

# qos
UP, DOWN = 1.2, 0.8
OVER, UNDER = 1.1, 0.9
"""Times the target: beyond these there are too many users, or too few."""

FAR, DOWN_FAR = 2.0, 0.5
"""Both of two looks so many times above the target, and no number of users known to be well: then
so many users are left. A fifth less would only be the next of many."""

STRIKES = 2
"""Looks in a row that must find too many before it is believed."""

STEADY = 3
"""Looks at one number of users: together they say whether it is the right one."""

ON_TARGET = 1.05
"""Times the target, or below it by as much: that ends the search."""

NEAR = 1.6
"""Times the target, or below it by as much: looks that say where it lies."""

CONFIRMING = 4
"""Looks at what was found, before it is the answer."""

WRONG = 1.3
"""Times the target, or below it by as much, at what was found: the search goes on."""

UP_A_LITTLE = 1.1
"""Between `UNDER` and what is on target."""

COOLDOWN = 3
"""Looks that are left out after users have left: the queue they made has to drain."""

CLOSE_ENOUGH = 0.05

# capacity
FIRST_STEP, STEP = 0.4, 0.2
MIN_STEP, MAX_STEP = 5, 100
NEW_PEAK = 1.01
FAILURES = 2


def saturation(served_ms: Mapping[str, Sequence[float]]) -> float:
    """Of the class that is worst off: its P95 in units of its target. 1 is exactly on target."""
    return max(
        (
            percentile(values, 95) / QOS_BY_NAME[name].target_p95_ms
            for name, values in served_ms.items()
            if values
        ),
        default=0.0,
    )


class QosState(NamedTuple):
    """What the search for the most users knows."""

    users: int
    good: int = 0
    """The most users that were well."""

    bad: int | None = None
    """The fewest that were too many."""

    strikes: int = 0
    looks: tuple[float, ...] = ()
    """What was found at this number of users."""

    cooldown: int = 0
    seen: tuple[tuple[int, float], ...] = ()
    """Users and saturation of every look that counted."""

    confirming: int = 0
    """Looks that are left of those at what was found."""


class Decision(NamedTuple):
    """`users` from now on; `done` when nothing more is to be found out."""

    users: int
    reason: str
    done: bool = False


def decide_qos(state: QosState, saturation: float, target: float) -> tuple[QosState, Decision]:
    """After one look at `state.users` users."""
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
        # Whatever made more users too many is over: a search that it misled begins anew.
        return _more(state._replace(good=state.users, bad=None, seen=state.seen[-CONFIRMING:]), UP)
    if off > WRONG:
        return _too_many(state._replace(good=state.good if state.good < state.users else 0))
    return state, Decision(most_users(state, target), "confirmed", True)


def _search(state: QosState, saturation: float, target: float) -> tuple[QosState, Decision]:
    """`done` when something was found, or when nothing can be."""
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
    """With no number of users that was well yet, go on with `times` as many."""
    users = state.users
    bad = users if state.bad is None else min(state.bad, users)
    # What was well before may have been luck.
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
    """The answer of a search: where the saturation that was seen crosses the target.

    A single look errs by a tenth or two, so all that came near the target count: a line through
    their logarithms, read within the numbers of users that were tried. Without two such numbers it
    is the most that were well; 0 when a single user was too many.
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
    """What the search for the highest throughput knows."""

    users: int
    peak: float = 0.0
    peak_users: int = 0
    failures: int = 0


def decide_capacity(state: CapacityState, throughput: float) -> tuple[CapacityState, Decision]:
    """After one look at `state.users` users; `throughput` in any unit."""
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
