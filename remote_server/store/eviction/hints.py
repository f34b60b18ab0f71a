"""Hints of requests: whether a prompt returns, how soon, and whether the sender is believed."""

from bisect import bisect_left

from remote_server.protocol import Hint
from remote_server.store.eviction.hazard import MARKS, TURNS, class_of

WITHIN_S = (60.0, 300.0, 1800.0)
"""Prompts that return are of four marks: within these times, and later or without a time."""

NO_HINT, NO = 0, MARKS - 1
"""Marks of a request without a hint, or with one that is not believed, and of one whose prompt does
not return. Those between are of prompts that return."""

MAX_TURN = 15

KINDS = [
    [
        tuple(
            class_of(max(min(turn, TURNS - 1), uses), mark if uses <= turn else NO_HINT)
            for uses in range(MAX_TURN + 2)
        )
        for mark in range(MARKS)
    ]
    for turn in range(MAX_TURN + 1)
]
"""By turn and mark of a request: the classes of its blocks, by the number of their uses before. A
block with more uses than its conversation has turns is shared with other prompts, which the hint
does not speak for."""

MAX_OPEN = 8192
"""Prompts whose return is awaited, of all namespaces."""

MAX_NAMESPACES = 1024
"""Those with hints that are counted; a newer one takes the place of the oldest."""

MEMORY = 2000.0
"""Prompts of a namespace after which all its counts are halved."""

LEAST_SHARE = 0.02
"""Answers of which one is rarer than this carry no information."""

LEAST_PROMPTS, LEAST_RETURNS = 30.0, 10.0
"""Prompts of each answer, and returns of both, before outcomes decide."""

RIGHT = 1.5
"""Prompts that return by their hints must do so this many times as often as the others."""


def mark_of(hint: Hint | None) -> int:
    """The mark of a request with this hint, or without."""
    if hint is None:
        return NO_HINT
    if not hint.returns:
        return NO
    within_s = hint.within_s
    return 1 + (bisect_left(WITHIN_S, within_s) if within_s else len(WITHIN_S))


class Trust:
    """Which namespaces give hints that carry information.

    One whose every prompt returns by its hints has no advantage from them over others that give
    none: its hints are as if there were none, as are those that outcomes do not bear out. Until
    enough outcomes are known, hints are believed that differ from prompt to prompt.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[float]] = {}
        """By namespace: prompts that return by their hints, the others, and of each those that
        did."""
        self._open: dict[int, tuple[str, int]] = {}
        """The end of a prompt to its namespace, and whether it returns by its hint."""

    def mark(self, namespace: str, hint: Hint | None, end: int) -> int:
        """The mark of a prompt with this end, or `NO_HINT`; its return is awaited."""
        counts = self._counts.get(namespace)
        if counts is None:
            if hint is None:
                return NO_HINT
            if len(self._counts) >= MAX_NAMESPACES:
                del self._counts[next(iter(self._counts))]
            counts = self._counts[namespace] = [0.0] * 4
        other = int(hint is None or not hint.returns)
        counts[other] += 1.0
        if counts[0] + counts[1] > MEMORY:
            counts[:] = [count / 2 for count in counts]
        self._open.pop(end, None)
        self._open[end] = namespace, other
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        return mark_of(hint) if self.believes(namespace) else NO_HINT

    def returned(self, end: int) -> None:
        """The prompt with this end was continued, or came again."""
        if (one := self._open.pop(end, None)) is not None and one[0] in self._counts:
            self._counts[one[0]][2 + one[1]] += 1.0

    def believes(self, namespace: str) -> bool:
        """Whether the hints of this namespace count."""
        counts = self._counts.get(namespace)
        if counts is None:
            return False
        yes, others, yes_returned, others_returned = counts
        if min(yes, others) < LEAST_SHARE * (yes + others):
            return False
        few = min(yes, others) < LEAST_PROMPTS or yes_returned + others_returned < LEAST_RETURNS
        return few or yes_returned * others > RIGHT * others_returned * yes
