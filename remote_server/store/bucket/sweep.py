"""Removal from the bucket, without a leader: each server sweeps partitions in random order.

What is too old goes. Then, in a partition above its share of the budget, the oldest goes. Ages are
those of the store's own clock. Two servers that sweep the same partition remove the same packs.
"""

from typing import NamedTuple

from remote_server.store.bucket.objects import BucketError, Failure, Listed, Objects
from remote_server.store.bucket.packs import parse_name

PARTITIONS = 256

REMOVED_AT_ONCE = 256

CLOCK = "=clock"
"""An object without a meaning, which is no pack: its date is the store's clock."""


class Limits(NamedTuple):
    """What a bucket may hold."""

    num_bytes: int = 0
    """Of the whole bucket; 0: no limit."""
    max_age_s: float = 0.0
    """0: no limit."""

    @property
    def any(self) -> bool:
        return bool(self.num_bytes or self.max_age_s)


class Swept(NamedTuple):
    """The end of one sweep."""

    removed: list[tuple[str, bytes]]
    """Namespace and key of each pack that was removed."""
    num_packs: int = 0
    """Those that stay in the partition."""
    num_bytes: int = 0
    failure: Failure | None = None
    now: float = 0.0
    """The store's clock."""


def sweep_one(
    objects: Objects,
    prefix: str,
    partition: str,
    limits: Limits,
) -> Swept:
    """Sweep the packs of one partition in all namespaces below `prefix`."""
    gone: list[Listed] = []
    try:
        found = [
            listed
            for folder in objects.folders(prefix)
            for chunk in objects.listing(f"{folder}/{partition}")
            for listed in chunk
            if parse_name(listed.name) is not None
        ]
        found.sort(key=lambda listed: listed.modified)
        now = objects.time(f"{prefix}/{CLOCK}")
        gone = too_many(found, limits, now)
        for start in range(0, len(gone), REMOVED_AT_ONCE):
            objects.remove([each.name for each in gone[start : start + REMOVED_AT_ONCE]])
    except BucketError as error:
        return Swept([], failure=error.failure)
    names = [parse_name(each.name) for each in gone]
    left = found[len(gone) :]
    return Swept(
        [(named.namespace, named.key) for named in names if named is not None],
        len(left), sum(each.num_bytes for each in left), now=now,
    )  # fmt: skip


def too_many(found: list[Listed], limits: Limits, now: float) -> list[Listed]:
    """Those of one partition, the oldest first, that must go."""
    share = limits.num_bytes // PARTITIONS
    total = sum(each.num_bytes for each in found)
    num = 0
    for each in found:
        too_old = limits.max_age_s and now - each.modified > limits.max_age_s
        if not too_old and not (limits.num_bytes and total > share):
            break
        total -= each.num_bytes
        num += 1
    return found[:num]
