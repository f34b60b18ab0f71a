"""Upper bounds on hits: without a limit, and with room for a number of blocks.

Both depend on the trace alone; no store, no policy and no level has a part in them.

A request finds its leading present blocks, up to the first absent one. After it, any of the blocks
that were present or that it has may be kept, up to the capacity. The optimum is the most hits of
all requests together.

A hit was kept from its last use to this one. So each pair of successive uses of a block is an
interval, and keeping it takes one place between those two requests: the question is how many
intervals fit when at no time more than `capacity` overlap. Dropping the interval that ends last
whenever there are too many is optimal (Belady's rule; here a block may also not be kept at all).
That only a prefix counts costs nothing: a request that uses a block uses all before it, so a
block's predecessor is never needed later than the block, and with ties dropped from the end of the
prompt the kept blocks are always whole prefixes.

No division into levels, no order within a request and no policy can do better with as many places
in all; copies of a block on several levels take more places.
"""

import heapq
from collections.abc import Sequence
from math import inf

from remote_server.traces import Request


def without_limit(requests: Sequence[Request]) -> int:
    """Blocks found when nothing is ever evicted."""
    seen: set[int] = set()
    found = 0
    for request in requests:
        for block in request.blocks:
            if block not in seen:
                break
            found += 1
        seen.update(request.blocks)
    return found


def next_uses(requests: Sequence[Request]) -> list[list[float]]:
    """For each request, the next use of each of its blocks: a request's number, or infinity."""
    upcoming: dict[int, int] = {}
    uses: list[list[float]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number].blocks
        uses.append([upcoming.get(block, inf) for block in blocks])
        upcoming.update(dict.fromkeys(blocks, number))
    return uses[::-1]


def optimum(requests: Sequence[Request], capacity: int, uses: list[list[float]]) -> int:
    """The most blocks that all `requests` can find with room for `capacity` blocks.

    `uses` are their `next_uses`, made once for all capacities.
    """
    kept: dict[int, float] = {}
    """Block to its next use."""
    last: list[tuple[float, int, int]] = []
    """A heap of (-next use, -depth, block): the first one is dropped first. May be stale."""
    found = 0
    for request, again in zip(requests, uses, strict=True):
        for block in request.blocks:
            if block not in kept:
                break
            found += 1
        for depth, (block, use) in enumerate(zip(request.blocks, again, strict=True)):
            if use == inf:
                kept.pop(block, None)
            else:
                kept[block] = use
                heapq.heappush(last, (-use, -depth, block))
        while len(kept) > capacity:
            use, _, block = heapq.heappop(last)
            if kept.get(block) == -use:
                del kept[block]
    return found
