"""Placement: which two servers of a list are the homes of a run.

Rendezvous hashing: each server has a score for each run, and the two highest are its homes. A
server that joins or leaves moves only the runs that it wins or held. No server and no other client
is asked. Names are hashed, not addresses, so a server that comes back elsewhere keeps its runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import xxhash

# Anchors whose homes are remembered: those of about 2,000 long prompts, 1 MB.
MOST_REMEMBERED = 16_384


class Homes(NamedTuple):
    """Indices of servers in a list. Both are 0 in a list of one."""

    first: int
    second: int


def homes(names: Sequence[str], namespace: str, anchor: bytes) -> Homes:
    """The servers with the two highest scores for the run that begins with the key `anchor`.

    A score is `XXH3_64(name ‖ 0 ‖ namespace ‖ 0 ‖ anchor)`. Equal scores are ordered by name, so
    the order of `names` does not matter.
    """
    rest = b"\0" + namespace.encode() + b"\0" + anchor
    best = sorted(
        range(len(names)),
        key=lambda index: (xxhash.xxh3_64_intdigest(names[index].encode() + rest), names[index]),
        reverse=True,
    )
    return Homes(best[0], best[1] if len(best) > 1 else best[0])


class Placement:
    """`homes` in one list of servers, with a memory of the last anchors. For any thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._known: dict[tuple[str, bytes], Homes] = {}

    def homes(self, namespace: str, anchor: bytes) -> Homes:
        known = self._known.get((namespace, anchor))
        if known is None:
            if len(self._known) >= MOST_REMEMBERED:
                self._known = {}
            known = self._known[namespace, anchor] = homes(self.names, namespace, anchor)
        return known
