"""Differences of declared fields that keep two engines from sharing blocks.

Pure functions over the server's stats. Used by `kvferry why` and by the engine for its own log.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from remote_server.plain_text import plain
from remote_server.protocol import NamespaceStats

# An engine that differs in more fields runs something else altogether, and sharing its blocks is
# not expected. A different dtype alone changes three or four.
MOST_FIELDS = 5

# Fields that do not separate engines: two folders, for one, may hold the same model. Routers make
# keys from tokens by `key_tokens`; its value follows from fields that do separate.
FOR_PEOPLE = ("model_name", "key_tokens")

_DIGEST = re.compile(r"[0-9a-f]{16,}")


class Difference(NamedTuple):
    """`here` finds no block that `there` stored, because of `fields`."""

    here: str
    there: str
    """Engines, by the name that they declared."""
    namespace: str
    other: str
    """Their namespaces; the same one when only the keys differ, as with another hash seed."""
    fields: dict[str, tuple[str, str]]
    """By name: the value here and the value there, empty where one side has none."""
    blocks: int
    """Number of blocks of `other`, in memory and on disk."""

    def line(self) -> str:
        """One line for people, readable values first. Of two digests only the difference matters;
        it mostly follows from the fields named before."""
        readable, digests = [], []
        for name, (here, there) in sorted(self.fields.items()):
            if _DIGEST.fullmatch(here) and _DIGEST.fullmatch(there):
                digests.append(f"the digest of {name} differs")
            else:
                readable.append(
                    f"{name} is {here or 'not set'} here and {there or 'not set'} there"
                )
        diff = ", ".join(readable + digests)
        return plain(f"{self.here or 'this engine'} cannot use the blocks of {self._whose}: {diff}")

    @property
    def _whose(self) -> str:
        if self.namespace == self.other:
            return f"{self.there or 'another engine'} in the same namespace"
        return f"{self.other} ({self.blocks:,} blocks)"


def compare(here: Mapping[str, str], there: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The fields in which two fingerprints differ, with both values, without `FOR_PEOPLE`."""
    return {
        name: (here.get(name, ""), there.get(name, ""))
        for name in {**here, **there}
        if here.get(name, "") != there.get(name, "") and name not in FOR_PEOPLE
    }


def gaps_of(
    namespace: str,
    engine: str,
    fingerprint: Mapping[str, str],
    known: Mapping[str, NamespaceStats],
) -> list[Difference]:
    """Differences that keep `engine` from similar blocks: in its own namespace another way of
    making keys, and of the other namespaces with blocks the one that differs least."""
    found = []
    if (own := known.get(namespace)) is not None:
        for other, differs in own.engines.items():
            fields = compare(fingerprint, own.fingerprint | differs)
            if other != engine and fields:
                found.append(Difference(engine, other, namespace, namespace, fields, _blocks(own)))
    nearest = min(_others(namespace, engine, fingerprint, known), key=_distance, default=None)
    if nearest is not None and len(nearest.fields) <= MOST_FIELDS:
        found.append(nearest)
    return found


def all_gaps(known: Mapping[str, NamespaceStats]) -> list[Difference]:
    """The differences of the engine that declared each namespace last."""
    return [
        gap
        for namespace, stats in known.items()
        if not stats.forgotten
        for gap in gaps_of(namespace, stats.client, stats.fingerprint, known)
    ]


def _others(
    namespace: str, engine: str, fingerprint: Mapping[str, str], known: Mapping[str, NamespaceStats]
) -> Iterable[Difference]:
    for other, stats in known.items():
        if other == namespace or not stats.fingerprint or not (blocks := _blocks(stats)):
            continue
        if fields := compare(fingerprint, stats.fingerprint):
            yield Difference(engine, stats.client, namespace, other, fields, blocks)


def _distance(gap: Difference) -> tuple[int, int]:
    return len(gap.fields), -gap.blocks


def _blocks(stats: NamespaceStats) -> int:
    """At least so many: most blocks are in several tiers."""
    return max((share.blocks for share in stats.tiers.values()), default=0)
