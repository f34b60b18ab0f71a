"""Removal from the bucket, without a leader: each server sweeps partitions in random order.

What is too old goes. Then, in partitions above their share of the budget, the oldest goes. Ages are
those of the store's own clock. Two servers that sweep the same partitions remove the same packs.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from remote_server.store.bucket.index.contents import Swept
from remote_server.store.bucket.objects.objects import BucketError, Failure, Listed, Objects
from remote_server.store.bucket.packs.object_names import PARTITIONS, pack_id, parse_name

LEAST_PACKS = 32
"""Partitions are swept together until their share of the budget has room for so many packs: that of
one partition alone may be smaller than a pack, and would never keep one."""

REMOVED_AT_ONCE = 256

MOST_PACKS = 1 << 19
"""Of one sweep, 150 MB: a store may send a list without an end. All partitions, of packs of 16 MiB,
have two petabytes then, where each is swept by itself."""

UNFINISHED_S = 3600.0
"""A write that takes longer has ended with its server."""

CLOCK = "=clock"
"""An object without a meaning, which is no pack: its date is the store's clock."""


class Limits(NamedTuple):
    """What a bucket may hold."""

    num_bytes: int = 0
    """Of the whole bucket; 0: no limit."""
    max_age_s: float = 0.0
    """0: no limit."""
    can_renew: bool = True
    """A use late in its life makes a pack young. Without: its age is that of its blocks."""

    @property
    def any(self) -> bool:
        return bool(self.num_bytes or self.max_age_s)


def one_round(limits: Limits, pack_bytes: int) -> list[range]:
    """All partitions in random order, in neighbouring groups that are swept together."""
    size, least = 1, LEAST_PACKS * pack_bytes
    while limits.num_bytes and size < PARTITIONS and _share(limits, size) < least:
        size *= 2
    groups = [range(first, first + size) for first in range(0, PARTITIONS, size)]
    random.shuffle(groups)
    return groups


def sweep(objects: Objects, prefix: str, partitions: range, limits: Limits) -> Swept:
    """Sweep the packs of `partitions` in all namespaces below `prefix`."""
    try:
        folders = _folders(objects, prefix, partitions)
        found = _packs(objects, folders)
        found.sort(key=lambda listed: (listed.modified, listed.name))
        now = objects.time(f"{prefix}/{CLOCK}")
        gone = too_many(found, limits, now, len(partitions))
        for start in range(0, len(gone), REMOVED_AT_ONCE):
            objects.remove([each.name for each in gone[start : start + REMOVED_AT_ONCE]])
        for folder in folders:
            objects.remove_unfinished(folder, now - UNFINISHED_S)
    except BucketError as error:
        return Swept([], failure=error.failure)
    names = [parse_name(each.name) for each in gone]
    left = found[len(gone) :]
    return Swept(
        [(named.namespace, named.key) for named in names if named is not None],
        partitions, ids_of(left), sum(each.num_bytes for each in left), now=now,
    )  # fmt: skip


def _packs(objects: Objects, folders: Sequence[str]) -> list[Listed]:
    found: list[Listed] = []
    for folder in folders:
        for chunk in objects.listing(folder):
            found += [listed for listed in chunk if parse_name(listed.name) is not None]
            if len(found) > MOST_PACKS:
                raise BucketError(Failure.OTHER, f"more than {MOST_PACKS} packs below {folder}")
    return found


def _folders(objects: Objects, prefix: str, partitions: range) -> list[str]:
    namespaces = objects.folders(prefix)
    if len(partitions) == PARTITIONS:
        return namespaces
    return [f"{folder}/{number:02x}" for folder in namespaces for number in partitions]


def ids_of(found: Sequence[Listed]) -> dict[str, list[int]]:
    """By namespace, the sorted `pack_id` of those of `found` that are packs."""
    ids: dict[str, list[int]] = {}
    for each in found:
        named = parse_name(each.name)
        if named is not None:
            ids.setdefault(named.namespace, []).append(pack_id(named.namespace, named.key))
    return {namespace: sorted(some) for namespace, some in ids.items()}


def too_many(
    found: list[Listed], limits: Limits, now: float, num_partitions: int = 1
) -> list[Listed]:
    """Those of `num_partitions` partitions, the oldest first, that must go."""
    share = _share(limits, num_partitions)
    total = sum(each.num_bytes for each in found)
    num = 0
    for each in found:
        too_old = limits.max_age_s and now - each.modified > limits.max_age_s
        if not too_old and not (limits.num_bytes and total > share):
            break
        total -= each.num_bytes
        num += 1
    return found[:num]


def _share(limits: Limits, num_partitions: int) -> int:
    return limits.num_bytes * num_partitions // PARTITIONS
