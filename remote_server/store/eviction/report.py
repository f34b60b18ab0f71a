"""Statistics of eviction that learns: rules, classes and their chances of another use."""

from remote_server.protocol import EvictionStats
from remote_server.store.eviction.hazard import MARKS, TURNS, UNKNOWN, class_of
from remote_server.store.eviction.hints import WITHIN_S as HINTED_S
from remote_server.store.eviction.learner import Learner
from remote_server.store.eviction.victims import Rule

WITHIN_S = (60.0, 300.0, 1800.0)

LEAST_SEEN = 20
"""Observations from which on the chances of a class are shown."""

_TURNS = [*(f"turn {turn + 1}" for turn in range(TURNS - 1)), f"turn {TURNS} and later"]
_MARKS = ["", *(f", back in {seconds / 60:g} min" for seconds in HINTED_S), ", back", ", not back"]

CLASSES = {
    **{class_of(turn, mark): _TURNS[turn] + _MARKS[mark]
       for mark in range(MARKS) for turn in range(TURNS)},
    UNKNOWN: "alone",
}  # fmt: skip
"""Names of classes, by turn and hint; `alone` are blocks whose place in a prompt is not known."""


def eviction_stats(learner: Learner | None) -> EvictionStats | None:
    """What `learner` has learned now; None without one."""
    if learner is None:
        return None
    hazards = learner.hazards
    return EvictionStats(
        rule=learner.rule,
        switches=learner.floor.num_changes,
        found={rule.value: learner.floor.rate(rule) for rule in Rule},
        policy_bytes=learner.num_bytes,
        within_s=[*WITHIN_S],
        returns={
            name: [hazards.within(kind, horizon_s) for horizon_s in WITHIN_S]
            for kind, name in CLASSES.items()
            if hazards.seen[kind] >= LEAST_SEEN
        },
    )
