"""The servers of a tier's client over time: which came back, which restarted, which left the list.

What the tier keeps for a server it keeps by the server's name: numbers change with the list. One
server has the name "".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

from kv_connector.tier import metrics
from kv_connector.tier.break_even import BreakEven, name_of
from kv_connector.tier.transfer_ends import NO_SERVERS, Ended, Servers
from remote_server.client import CacheClient


class News(NamedTuple):
    """What has changed since the last look, by names."""

    first_ready: bool = False
    """Some server is ready, and none was."""
    came_back: Sequence[str] = ()
    """Ready, and were not, or were not in the list."""
    restarted: Sequence[str] = ()
    """Ready in another boot than before: without the blocks of the former one."""
    left: Sequence[str] = ()
    """No longer in the list."""


NO_NEWS = News()


@dataclass
class ServerWatch:
    """Only the scheduler thread calls it."""

    client: CacheClient
    _seen: tuple[Servers, tuple[bool, ...]] = (NO_SERVERS, ())
    _boots: dict[str, str | None] = field(default_factory=dict)
    """By name: the last boot in which a server was ready."""
    _current: Servers = NO_SERVERS
    """The same, in the form in which a transfer has it when it ends."""

    def poll(self) -> News:
        """The changes since the last call."""
        client = self.client
        now = Servers(client.names, client.epochs), client.are_ready
        if now == self._seen:
            return NO_NEWS
        (servers, ready), (before, were_ready) = now, self._seen
        self._seen = now
        was_ready = dict(zip(before.names, were_ready, strict=False))
        boots: dict[str, str | None] = {}
        came_back, restarted = [], []
        for name, epoch, is_ready in zip(*servers, ready, strict=False):
            boots[name] = self._boots.get(name)
            if is_ready and not was_ready.get(name, False):
                came_back.append(name)
            if is_ready and epoch != boots[name]:
                boots[name] = epoch
                restarted.append(name)
        left = [name for name in self._boots if name not in boots]
        self._boots = boots
        self._current = Servers(servers.names, tuple(boots.values()))
        return News(any(ready) and not any(were_ready), came_back, restarted, left)

    def exclude(self, wrong: Mapping[str, str]) -> bool:
        """Do not use these servers, by name with the reason. False, without effect, if no other is
        left."""
        if wrong and wrong.keys() >= set(self.client.names):
            return False
        for name, why in wrong.items():
            self.client.exclude(name, why)
        return True

    def sorted_out(self, ended: Ended) -> Ended:
        """`ended` with what a server took in a boot that is over as unsent."""
        if ended.servers == self._current or not ended.held:
            return ended
        held: list[OffloadKey] = []
        lost: list[OffloadKey] = []
        for key in ended.held:
            is_over = self._is_over(ended.servers, self.holder_of(key))
            (lost if is_over else held).append(key)
        return ended._replace(held=held, unsent=[*ended.unsent, *lost])

    def _is_over(self, then: Servers, name: str) -> bool:
        return name not in self._boots or then.boot_of(name) != self._boots[name]

    def holder_of(self, key: bytes) -> str:
        """The name of the server that holds `key`, as far as is known."""
        return name_of(self.client.names, self.client.server_of(key))

    def holders_of(self, keys: Collection[bytes]) -> dict[bytes, str] | None:
        """The names of the servers that hold `keys`; None with one server."""
        if not self.client.places_by_run:
            return None
        return {key: self.holder_of(key) for key in keys}

    def gauges(self, break_even: BreakEven) -> "dict[metrics.Gauge, float | None]":
        """The metrics of each server, and of their list."""
        client = self.client
        names, several = client.names, client.places_by_run
        gauges: dict[metrics.Gauge, float | None] = {metrics.FLEET_SIZE: len(names)}
        for name, ready, breaker in zip(names, client.are_ready, client.breakers, strict=False):
            speed = break_even.server_speed(name) if several else break_even.link.bytes_per_s
            gauges[metrics.SERVER_READY, name] = int(ready)
            gauges[metrics.BREAKER_STATE, name] = metrics.BREAKER_STATES[breaker]
            gauges[metrics.LINK_SPEED, name] = speed
        return gauges
