"""A model of a fleet: servers as sets of keys, and the placement of a client over them.

A prompt is cut into runs. The key of a run's first row, its anchor, names two servers as its homes.
All servers are models of one server; the function that names the homes is the product's own.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from math import inf
from typing import NamedTuple

from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from remote_server.fleet.server import MOST_DOUBLINGS
from remote_server.runs import FIRST_RUN_TOKENS, run_of
from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

Homes = Callable[[Sequence[str], str, bytes], tuple[int, int]]
"""The two servers of a run: their places in the list of names, by namespace and anchor. Both are
equal where the list has one name."""

_GROUP = bytes(4)  # an engine's keys end with the number of the cache group


class Run(NamedTuple):
    """The run that a row belongs to."""

    number: int
    anchor: bytes
    """The key of its first row."""

    @property
    def of_head(self) -> bool:
        """Whether `copies=head` stores it on both homes: it ends below token 8,192."""
        return self.number <= _LAST_OF_HEAD


_LAST_OF_HEAD = run_of(8 * FIRST_RUN_TOKENS)


def key_of(block: int) -> bytes:
    """A block's key, as an engine's: a hash of 32 bytes and a cache group of 4."""
    return block.to_bytes(32, "big") + _GROUP


def runs_of(
    requests: Iterable[Request], tokens_per_block: int = TOKENS_PER_BLOCK
) -> dict[bytes, Run]:
    """The run of each block of a trace. Equal blocks follow equal blocks, so each has one."""
    found: dict[bytes, Run] = {}
    for request in requests:
        run = Run(-1, b"")
        for place, block in enumerate(request.blocks, 1):
            key, number = key_of(block), run_of(place * tokens_per_block)
            if number != run.number:
                run = Run(number, key)
            found.setdefault(key, run)
    return found


class FleetModel:
    """Servers by name, and what a client does with them. Requests do not overlap here."""

    def __init__(
        self,
        names: Sequence[str],
        namespace: str,
        runs: Mapping[bytes, Run],
        homes: Homes,
        make_server: Callable[[], ServerModel],
        *,
        copies_head: bool = False,
        keeps_runs_whole: bool = True,
    ) -> None:
        """`copies_head`: rows below token 8,192 are stored on both homes. `keeps_runs_whole`: rows
        go where the beginning of their run is; without it, where there is more room."""
        self.servers = {name: make_server() for name in names}
        self._now = 0.0
        self._started = dict.fromkeys(names, 0.0)
        self.read: Counter[str] = Counter()
        """Blocks got from each server."""
        self._make_server = make_server
        self._namespace, self._runs, self._function = namespace, runs, homes
        self._copies_head, self._keeps_runs_whole = copies_head, keeps_runs_whole
        self._names, self._previous = tuple(names), tuple[str, ...]()
        self._gone: set[str] = set()
        self._of_anchor: dict[bytes, tuple[str, ...]] = {}
        self._asked_of_anchor: dict[bytes, tuple[str, ...]] = {}

    # ── what happens to servers ──────────────────────────────────────────────────────────

    def lose(self, name: str) -> None:
        """The server answers nothing from now on. The list still has it."""
        self._gone.add(name)

    def bring_back(self, name: str, *, with_disk: bool) -> None:
        """The server that was lost answers again; what was in its memory is lost."""
        self._gone.discard(name)
        before = self.servers[name]
        self._start(name)
        if with_disk:
            self.servers[name].disk = before.disk

    def change_list(self, names: Sequence[str], *, ask_previous: bool) -> None:
        """Clients have another list from now on. With `ask_previous` they ask the homes by the list
        before it as well."""
        self._previous = self._names if ask_previous else ()
        self._names = tuple(names)
        for name in names:
            if name not in self.servers:
                self._start(name)
        self._of_anchor.clear()
        self._asked_of_anchor.clear()

    # ── what a client does ───────────────────────────────────────────────────────────────

    def homes(self, key: bytes) -> tuple[str, ...]:
        """The homes of this key's run, the first home first: one name in a list of one."""
        anchor = self._runs[key].anchor
        if (found := self._of_anchor.get(anchor)) is None:
            found = self._of_anchor[anchor] = self._homes_in(self._names, anchor)
        return found

    def asked_for(self, key: bytes) -> tuple[str, ...]:
        """The servers that a lookup of this key asks."""
        anchor = self._runs[key].anchor
        if (found := self._asked_of_anchor.get(anchor)) is None:
            before = self._homes_in(self._previous, anchor) if self._previous else ()
            found = tuple(dict.fromkeys((*self.homes(key), *before)))
            self._asked_of_anchor[anchor] = found
        return found

    def holders(self, key: bytes) -> list[str]:
        """The servers that answer a lookup of this key with yes."""
        return [
            name
            for name in self.asked_for(key)
            if name not in self._gone and self.servers[name].holds(key)
        ]

    def holds(self, key: bytes) -> bool:
        return any(
            name not in self._gone and self.servers[name].holds(key) for name in self.asked_for(key)
        )

    def get(self, keys: Sequence[bytes]) -> list[bytes]:
        """Read these; returns the present ones. A run is read from one server where one has it."""
        landed: list[bytes] = []
        for group in self._by_run(keys):
            holders = {key: self.holders(key) for key in group}
            both = [key for key in group if len(holders[key]) > 1]
            chosen = min(holders[both[0]], key=lambda name: self.read[name]) if both else ""
            by_server: dict[str, list[bytes]] = {}
            for key in group:
                if names := holders[key]:
                    name = chosen if chosen in names else names[0]
                    by_server.setdefault(name, []).append(key)
            for name, wanted in by_server.items():
                self.servers[name].get(wanted)
                landed += wanted
                self.read[name] += len(wanted)
        return landed

    def put(self, keys: Sequence[bytes]) -> None:
        """Store the keys that no home has; those of the head, with `copies_head`, on each home that
        lacks them."""
        for group in self._by_run(keys):
            run = self._runs[group[0]]
            alive = [name for name in self.homes(group[0]) if name not in self._gone]
            if self._copies_head and run.of_head:
                for name in alive:
                    self.servers[name].put(group)
            elif alive:
                new = [key for key in group if not self.holds(key)]
                self.servers[self._home_for(run, alive)].put(new)

    def set_time(self, now: float) -> None:
        """The time of the uses from now on; the ages of evicted blocks are counted in it."""
        self._now = now
        for server in self.servers.values():
            server.set_time(now)

    def check(self) -> None:
        for server in self.servers.values():
            server.check()

    def _start(self, name: str) -> None:
        self.servers[name] = self._make_server()
        self.servers[name].set_time(self._now)
        self._started[name] = self._now

    def _homes_in(self, names: Sequence[str], anchor: bytes) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(names[place] for place in self._function(names, self._namespace, anchor))
        )

    def _by_run(self, keys: Sequence[bytes]) -> list[list[bytes]]:
        groups: dict[bytes, list[bytes]] = {}
        for key in keys:
            groups.setdefault(self._runs[key].anchor, []).append(key)
        return [*groups.values()]

    def _home_for(self, run: Run, homes: Sequence[str]) -> str:
        """The home for rows of `run` that no home has: with the run's beginning, else with more
        room as the product's `roomier` has it, else the first."""
        for name in homes if self._keeps_runs_whole else ():
            if self.servers[name].holds(run.anchor):
                return name
        ages = [self.servers[name].lowest.evicted_age for name in homes]
        kept = max((age for age in ages if age is not None), default=None)
        if kept is not None:
            return max(homes, key=lambda name: self._age_of_evictions(name, kept))
        return min(homes, key=self._fill)

    def _age_of_evictions(self, name: str, kept_s: float) -> float:
        """`kept_s` is how long another home keeps a block."""
        lowest = self.servers[name].lowest
        if lowest.evicted_age is not None:
            return lowest.evicted_age
        up_s = lowest.now - self._started[name]
        return inf if up_s >= kept_s else float(2 ** min(up_s / 60, MOST_DOUBLINGS))

    def _fill(self, name: str) -> float:
        lowest = self.servers[name].lowest
        return len(lowest) / lowest.capacity


class FleetCounts(NamedTuple):
    """The sums of a replay, in blocks where nothing else is named."""

    blocks: int
    reusable: int
    """Found, from the first of each prompt to the first that is nowhere."""

    asked: list[int]
    """The servers that each prompt asked."""

    lost: Counter[str]
    """By server: found blocks that would not be usable if it were gone at that moment."""

    def usable(self, num_servers: int) -> float:
        """The part of the reusable blocks that stays usable when one server is gone: the mean over
        which one."""
        if not self.reusable:
            return 0.0
        return 1 - sum(self.lost.values()) / num_servers / self.reusable


def replay(
    requests: Sequence[Request],
    fleet: FleetModel,
    on_progress: Callable[[int], object] = lambda _: None,
    events: Mapping[int, Callable[[FleetModel], object]] | None = None,
) -> FleetCounts:
    """Each prompt looks up all of its blocks, gets the leading ones and puts the rest. `events` are
    called before the request with that number."""
    counts = FleetCounts(sum(len(each.blocks) for each in requests), 0, [], Counter())
    reusable = 0
    for number, request in enumerate(requests):
        if events and number in events:
            events[number](fleet)
        fleet.set_time(request.arrival_s)
        keys = [key_of(block) for block in request.blocks]
        counts.asked.append(len({name for key in keys for name in fleet.asked_for(key)}))
        holders = [*takewhile(bool, map(fleet.holders, keys))]
        counts.lost.update(_lost_with_each(holders))
        reusable += len(holders)
        fleet.get(keys[: len(holders)])
        fleet.put(keys[len(holders) :])
        on_progress(number + 1)
    fleet.check()
    return counts._replace(reusable=reusable)


def _lost_with_each(holders: Sequence[Sequence[str]]) -> dict[str, int]:
    """By server: the blocks of this prefix behind, and with, the first that only it holds."""
    lost: dict[str, int] = {}
    for place, names in enumerate(holders):
        if len(names) == 1:
            lost.setdefault(names[0], len(holders) - place)
    return lost
