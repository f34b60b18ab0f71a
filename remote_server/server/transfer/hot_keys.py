"""Hot keys: beginnings of runs that many clients get within a minute.

A client that has just loaded such a run can put it to the run's other home, and its reads are then
divided between two servers.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable

from remote_server.protocol import MAX_TOKENS, UNKNOWN, Get, Stretch
from remote_server.runs import FIRST_RUN_TOKENS, begins_run
from remote_server.store.gets import Found, Pinned

MOST_KEYS = 4096
"""Keys that are counted; the one that was got longest ago is forgotten for another."""

WITHIN_S = 60.0

ENOUGH_CLIENTS = 5
"""A key is hot when so many connections have got it within `WITHIN_S`."""

_MOST_CLIENTS = 2 * ENOUGH_CLIENTS
"""Connections that are remembered of a key."""

_MOST_READS = 64
"""Chain fields read for one get. A get of one run of a group needs two; one that mixes many prompts
may leave beginnings uncounted."""

_STARTS = (0, *(FIRST_RUN_TOKENS << run for run in range(MAX_TOKENS.bit_length())))
"""The first tokens of all runs."""

ChainOf = Callable[[int], Stretch]
"""The chain fields of the block at a position of a get."""


class _Seen:
    """The connections that have got one key, and when, the last one last."""

    __slots__ = ("clients", "is_beginning")

    def __init__(self) -> None:
        self.clients: dict[bytes, float] = {}
        self.is_beginning: bool | None = None
        """Once it was needed: a key names its tokens, so this never changes."""


class HotKeys:
    """Counts gets of beginnings of runs, by connection. One thread."""

    def __init__(
        self,
        clock: Callable[[], float],
        explain: Callable[[str, bytes], tuple[Stretch, object]] = lambda *_: (UNKNOWN, None),
    ) -> None:
        """`explain` gives the chain fields of a block below memory, by namespace and key."""
        self._clock = clock
        self._explain = explain
        self._seen: OrderedDict[tuple[str, bytes], _Seen] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def count(
        self,
        connection: bytes,
        namespace: str,
        keys: Iterable[tuple[int, bytes]],
        chain_of: ChainOf,
    ) -> list[int]:
        """Count a get of `keys`, with their positions. Returns the positions of those that are hot
        now and begin a run by their chain fields."""
        now, seen = self._clock(), self._seen
        hot: list[int] = []
        for position, key in keys:
            place = (namespace, key)
            one = seen.get(place)
            if one is None:
                one = seen[place] = _Seen()
                if len(seen) > MOST_KEYS:
                    seen.popitem(last=False)
            else:
                seen.move_to_end(place)
            clients = one.clients
            clients.pop(connection, None)
            clients[connection] = now
            if len(clients) < ENOUGH_CLIENTS:
                continue
            if len(clients) > _MOST_CLIENTS:
                del clients[next(iter(clients))]
            if [*clients.values()][-ENOUGH_CLIENTS] > now - WITHIN_S:
                if one.is_beginning is None:
                    one.is_beginning = is_beginning(chain_of(position))
                if one.is_beginning:
                    hot.append(position)
        return hot

    def among(self, connection: bytes, request: Get, found: Pinned | Found) -> list[int]:
        """Count a get that has found these blocks. Returns the indices of its keys that begin a run
        and are hot."""
        keys, indices = request.keys, found.indices

        def chain_of(position: int) -> Stretch:
            block, key = found.blocks[position], keys[indices[position]]
            return block.chain if block is not None else self._explain(request.namespace, key)[0]

        begins = [(place, keys[indices[place]]) for place in beginnings(chain_of, len(indices))]
        hot = self.count(connection, request.namespace, begins, chain_of)
        return [indices[place] for place in hot]


def beginnings(chain_of: ChainOf, number: int) -> list[int]:
    """Positions, of `number` blocks, of those that begin a run.

    Neighbours of one prompt mostly come in a row, and then their first and last one show where the
    beginnings are. So the cost does not grow with the number of blocks. A row whose inner blocks
    are of another prompt gives wrong positions; `HotKeys.count` checks those that it returns.
    """
    found: list[int] = []
    ranges = [(0, number - 1)] if number else []
    num_reads = 0
    while ranges and num_reads < _MOST_READS:
        first, last = ranges.pop()
        begin, end = chain_of(first), chain_of(last)
        num_reads += 2
        start, step = begin.start, begin.tokens
        in_a_row = end.start - start == (last - first) * step and end.tokens == step
        if step and in_a_row and end.group == begin.group:
            here = _STARTS[bisect_left(_STARTS, start) : bisect_left(_STARTS, end.end)]
            found += dict.fromkeys([first + (token - start) // step for token in here])
        elif last > first:
            middle = (first + last) // 2
            ranges += [(middle + 1, last), (first, middle)]
    return found


def is_beginning(block: Stretch) -> bool:
    """Whether the block with these chain fields begins a run."""
    return block.tokens > 0 and begins_run(block.start, block.end)
