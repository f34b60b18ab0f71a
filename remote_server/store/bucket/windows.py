"""Hybrid models: which packs of a prompt a hit from the bucket alone could load.

Of a group with a window engines keep rows at few places, by vLLM's default at the ends of prompts
alone. Packs of full attention in front of no such place would be written, and never read.
"""

from collections.abc import Sequence

from remote_server.protocol import KeyState
from remote_server.store.bucket.packs import Group


def whole(groups: Sequence[Group], states: bytes) -> list[Group]:
    """Those of `groups` all of whose rows are readable, by the `states` of their lookup."""
    return [group for group in groups if _is_whole(group.places, states)]


def _is_whole(places: range, states: bytes) -> bool:
    first, last = sorted((places[0], places[-1]))
    return states.count(KeyState.READABLE, first, last + 1) == len(places)


def loadable(groups: Sequence[Group], states: bytes) -> list[Group]:
    """Those of `whole` that lie before, or at, a place where a hit can end: there every group with
    a window has its rows, and packs of every other group reach it. None where `groups` have no
    group with a window: this lookup does not show such a place."""
    here = whole(groups, states)
    windowed = {group.fields.group for group in groups if group.fields.window}
    if not windowed:
        return []
    ends = _common_ends([group for group in here if group.fields.window], windowed)
    for dense in {group.fields.group for group in groups} - windowed:
        ends = _covered(ends, [group for group in here if group.fields.group == dense])
    last = max(ends, default=0)
    return [
        group for group in here
        if (group.end in ends if group.fields.window else group.fields.start < last)
    ]  # fmt: skip


def _common_ends(here: Sequence[Group], windowed: set[int]) -> set[int]:
    by_group: dict[int, set[int]] = {number: set() for number in windowed}
    for group in here:
        by_group[group.fields.group].add(group.end)
    return set.intersection(*by_group.values())


def _covered(ends: set[int], packs: Sequence[Group]) -> set[int]:
    """Those of `ends` that are in one of `packs`, which are equally long."""
    if not packs:
        return set()
    tokens = packs[0].end - packs[0].fields.start
    numbers = {(pack.end - 1) // tokens for pack in packs}
    return {end for end in ends if (end - 1) // tokens in numbers}
