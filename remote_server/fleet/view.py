"""The servers of a fleet at one moment, their homes of runs, and the runs of a request."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from remote_server.client.cache_requests import Anchors
from remote_server.fleet.placement import Placement
from remote_server.fleet.server import FleetServer
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import Stretch


class View:
    """The servers at one moment. Immutable: a request uses one from its beginning to its end."""

    def __init__(
        self,
        servers: Mapping[str, FleetServer],
        current: ServerList,
        previous: Sequence[tuple[float, Sequence[str]]] = (),
    ) -> None:
        """`servers` are those of all lists, but for those of earlier ones that never replied;
        `previous` the names of earlier lists, each with the time until which it is asked."""
        self.servers = dict(servers)
        self.names = tuple(servers)
        self.numbers = {server: number for number, server in enumerate(servers.values())}
        self.list = current
        self.current = Placement([one.name for one in current.members])
        self.previous = tuple((until, Placement(names)) for until, names in previous)

    def homes(self, namespace: str, anchor: bytes) -> list[FleetServer]:
        """The homes of a run, first and second, without repetition."""
        return self._homes_by(self.current, namespace, anchor)

    def all_homes(self, namespace: str, anchor: bytes, now_s: float) -> list[FleetServer]:
        """And behind them those by the previous lists, as long as these are asked."""
        found = self.homes(namespace, anchor)
        for until_s, placement in self.previous:
            if now_s < until_s:
                others = self._homes_by(placement, namespace, anchor)
                found += [one for one in others if one not in found]
        return found

    def _homes_by(self, placement: Placement, namespace: str, anchor: bytes) -> list[FleetServer]:
        homes = dict.fromkeys(placement.homes(namespace, anchor))
        names = [placement.names[number] for number in homes]
        return [self.servers[name] for name in names if name in self.servers]


def runs_in(keys: Sequence[bytes], anchors: Anchors) -> Iterator[tuple[bytes, range]]:
    """The anchor of each run, and the indices of its keys, which are neighbours. A key without an
    anchor is a run of its own."""
    if not anchors:
        for index, key in enumerate(keys):
            yield key, range(index, index + 1)
        return
    begin = 0
    for anchor, run in groupby(anchors):
        end = begin + len([*run])
        if anchor is not None:
            yield anchor, range(begin, end)
        else:
            for index in range(begin, end):
                yield keys[index], range(index, index + 1)
        begin = end


def ends_of(chain: Sequence[Stretch]) -> Iterator[int]:
    """Where the tokens of each block end; 0 where that is not known."""
    for stretch in chain:
        for row in range(stretch.rows):
            yield stretch.end + row * stretch.step if stretch.tokens else 0
