"""Hybrid models: whether a hit from the bucket alone could end anywhere in a prompt.

Of a group with a window engines keep rows at few places, by vLLM's default at the ends of prompts.
Where no pack of full attention reaches such a place, all packs would be written and never read.
"""

import logging
from collections.abc import Sequence

from remote_server.protocol import KeyState
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS
from remote_server.store.chains import Group

log = logging.getLogger(__name__)


def whole(groups: Sequence[Group], states: bytes) -> list[Group]:
    """Those of `groups` all of whose rows are readable, by the `states` of their lookup."""
    return [group for group in groups if _is_whole(group.places, states)]


def _is_whole(places: range, states: bytes) -> bool:
    first, last = sorted((places[0], places[-1]))
    return states.count(KeyState.READABLE, first, last + 1) == len(places)


def can_end(groups: Sequence[Group], states: bytes) -> bool:
    """Whether the lookup of `groups` shows a place where a hit can end: there every group with a
    window has its rows, and packs of every other group reach it."""
    windowed, dense = _numbers(groups)
    ends = {number: set[int]() for number in windowed}
    packs: dict[int, list[Group]] = {number: [] for number in dense}
    for group in whole(groups, states):
        if group.fields.window:
            ends[group.fields.group].add(group.end)
        else:
            packs[group.fields.group].append(group)
    places = set.intersection(*ends.values()) if ends else set()
    for some in packs.values():
        places = _reached(places, some)
    return bool(places)


def shows_every_end(groups: Sequence[Group]) -> bool:
    """Whether the lookup of `groups` names the rows of all windows where packs of full attention
    end. One that a level above the server has answered in part does not."""
    windowed, _ = _numbers(groups)
    dense_ends = {group.end for group in groups if not group.fields.window}
    ends = {number: set[int]() for number in windowed}
    for group in groups:
        if group.fields.window:
            ends[group.fields.group].add(group.end)
    return bool(windowed) and all(dense_ends <= some for some in ends.values())


def _numbers(groups: Sequence[Group]) -> tuple[set[int], set[int]]:
    """The numbers of the groups with a window, and of the others."""
    windowed = {group.fields.group for group in groups if group.fields.window}
    return windowed, {group.fields.group for group in groups} - windowed


def _reached(places: set[int], packs: Sequence[Group]) -> set[int]:
    """Those of `places` that are in one of `packs`, which are equally long."""
    if not packs:
        return set()
    tokens = packs[0].end - packs[0].fields.start
    numbers = {(pack.end - 1) // tokens for pack in packs}
    return {place for place in places if (place - 1) // tokens in numbers}


class Hybrids:
    """The namespaces with windows. One thread."""

    def __init__(self) -> None:
        self._can_end: dict[str, bool | None] = {}
        """Whether a hit of packs can end anywhere. None: no lookup has shown it. False: the log has
        it."""

    def __contains__(self, namespace: str) -> bool:
        return namespace in self._can_end

    def add(self, namespace: str) -> None:
        """A lookup of `namespace` had groups with a window."""
        self._can_end.setdefault(namespace, None)

    def forget(self, namespace: str | None) -> None:
        """Forget one namespace, or all."""
        for name in [*self._can_end] if namespace is None else [namespace]:
            self._can_end.pop(name, None)

    def is_worthless(self, namespace: str) -> bool:
        """Whether lookups have shown that no hit can end where its packs do."""
        return self._can_end.get(namespace, True) is False

    def has_ends(
        self, namespace: str, groups: Sequence[Group], states: bytes, wanted: Sequence[Group]
    ) -> bool:
        """Whether any lookup has shown that a hit can end where packs reach; this one had `groups`,
        of which `wanted` are to be written. The log has it once where none can."""
        if not self._can_end[namespace] and can_end(groups, states):
            self._can_end[namespace] = True
        if wanted and self._can_end[namespace] is None and shows_every_end(groups):
            self._can_end[namespace] = False
            log.warning(
                "bucket: %s keeps no window where a pack ends: nothing of it is written; start its "
                "engines with --prefix-cache-retention-interval %d", namespace, MAX_PACK_TOKENS,
            )  # fmt: skip
        return bool(self._can_end[namespace])
