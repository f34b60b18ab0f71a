"""The readable prefix of a prompt, in tokens and by tier, from the tier of each of its blocks."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from remote_server.prompt_keys import GroupKeys


class Prefix(NamedTuple):
    """The tokens of a prompt, from the first one, that can be read."""

    tokens: int
    by_tier: dict[str, int]
    """The tokens of the prefix that each tier supplies, the fastest tier that has a block."""


def prefix_of(groups: Sequence[tuple[GroupKeys, bytes]]) -> Prefix:
    """The prefix that all groups have. Of each group: its keys, and for each key the place in
    `TIERS`, from 1, of the tier that has it, or 0. A model with several groups needs the blocks of
    each; the tiers are those of the group with the smallest blocks."""
    if not groups:
        return Prefix(0, {})
    tokens = min(group.tokens_per_key * _readable(places) for group, places in groups)
    finest, places = min(groups, key=lambda each: each[0].tokens_per_key)
    supplied = Counter(places[: tokens // finest.tokens_per_key])
    by_tier = {
        TIERS[place - 1]: number * finest.tokens_per_key
        for place, number in sorted(supplied.items())
    }
    return Prefix(tokens, by_tier)


TIERS = ("memory", "disk", "bucket")
"""The fastest first."""


def joined(num_keys: int, answers: Iterable[tuple[Sequence[str], bytes]]) -> bytes:
    """For each key the best place in `TIERS`, from 1, by the answers of several servers, each with
    the names of its own tiers; 0 where none has it."""
    best = np.zeros(num_keys, np.uint8) - 1  # 255: nowhere
    for tiers, places in answers:
        ranks = [TIERS.index(name) + 1 if name in TIERS else 255 for name in tiers]
        table = np.array([255, *ranks], np.uint8)
        best = np.minimum(best, table[np.frombuffer(places, np.uint8)])
    best[best == 255] = 0
    return best.tobytes()


def _readable(places: bytes) -> int:
    """How many keys, from the first one, are readable."""
    absent = places.find(0)
    return len(places) if absent < 0 else absent
