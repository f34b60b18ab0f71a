"""How many users next? Decisions only: what was measured goes in, what to do comes out.

`qos` looks for the most users whose answers stay within their targets: it adds users until there
are too many, and then halves what lies between the last number that was well and the first that
was not. `capacity` looks for the most bytes per second: it adds users until that no longer helps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.statistics import percentile
from benchmarks.storage_workload.personas import QOS_BY_NAME

MAX_USERS = 500

# qos
UP, DOWN = 1.2, 0.8
OVER, UNDER = 1.1, 0.9
"""Times the target: beyond these there are too many users, or too few."""

STRIKES = 2
"""Looks in a row that must find too many before it is believed."""

STEADY = 3
"""Looks in a row that must find the right number: it ends the search."""

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
    steady: int = 0
    cooldown: int = 0


class Decision(NamedTuple):
    """`users` from now on; `done` when nothing more is to be found out."""

    users: int
    reason: str
    done: bool = False


def decide_qos(state: QosState, saturation: float, target: float) -> tuple[QosState, Decision]:
    """After one look at `state.users` users."""
    users = state.users
    if state.cooldown:
        left = state.cooldown - 1
        return state._replace(cooldown=left), Decision(users, "settling")
    if saturation > OVER * target:
        return _too_many(state._replace(steady=0))
    state = state._replace(strikes=0)
    if saturation >= UNDER * target:
        state = state._replace(steady=state.steady + 1, good=max(state.good, users))
        done = state.steady >= STEADY
        return state, Decision(users, "on target", done)
    state = state._replace(steady=0, good=max(state.good, users))
    if users >= MAX_USERS:
        return state, Decision(users, "as many as there may be", True)
    if state.bad is None:
        more = min(MAX_USERS, max(users + 1, math.floor(users * UP)))
        return state._replace(users=more), Decision(more, "more")
    return _between(state)


def _too_many(state: QosState) -> tuple[QosState, Decision]:
    users = state.users
    state = state._replace(strikes=state.strikes + 1)
    if state.strikes < STRIKES:
        return state, Decision(users, "too slow once")
    bad = users if state.bad is None else min(state.bad, users)
    # What was well before may have been luck.
    state = state._replace(strikes=0, bad=bad, good=min(state.good, bad - 1))
    if bad <= 1:
        return state, Decision(1, "too slow for a single user", True)
    if not state.good:
        fewer = max(1, math.floor(users * DOWN))
        state = state._replace(users=fewer, cooldown=COOLDOWN)
        return state, Decision(fewer, "fewer")
    state, decision = _between(state)
    return state._replace(cooldown=0 if decision.done else COOLDOWN), decision


def _between(state: QosState) -> tuple[QosState, Decision]:
    assert state.bad is not None
    if state.bad - state.good <= max(1, CLOSE_ENOUGH * state.bad):
        return state._replace(users=state.good), Decision(state.good, "found", True)
    middle = (state.good + state.bad) // 2
    return state._replace(users=middle), Decision(middle, "between")


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
