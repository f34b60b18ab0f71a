"""The server that a benchmark measures: one started for it, or one that runs already."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.work.ferry_client import (
    PATIENCE_S,
    Client,
    connect_to,
    each_of,
    server_for,
)
from remote_server.fleet.server_list import FILE, ServerList, read_list
from remote_server.values import MiB, format_bytes, is_loopback

ELSEWHERE = "the server is on another machine, where this program runs nothing"


class Target:
    """Without addresses each measurement starts a server of its own. Running servers, of which two
    or more are a fleet, keep nothing of a measurement: it has a namespace of its own there and
    evicts no other block."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """`addresses` as in an engine's setting. Raises `ConfigError`."""
        self._members = list_of(addresses).members if addresses else ()
        self._text = text_of(list_of(addresses)) if addresses else ""
        self._suffix = f"-{secrets.token_hex(4)}" if addresses else ""

    @property
    def runs_already(self) -> bool:
        return bool(self._members)

    @property
    def is_fleet(self) -> bool:
        return len(self._members) > 1

    @property
    def is_elsewhere(self) -> bool:
        """Whether a server is on another machine, so that copies and sockets of this one are no
        bounds of it."""
        return not all(is_loopback(one.endpoint) for one in self._members)

    def namespace(self, name: str) -> str:
        return name + self._suffix

    @contextmanager
    def server(self, name: str, num_bytes: int, block_bytes: int) -> Iterator[str]:
        """The address of a server that holds `num_bytes` without evicting, for `namespace(name)`.
        Raises `Skipped` when a running one cannot be used."""
        if not self._members:
            with server_for(num_bytes, block_bytes) as started:
                yield started.endpoint
            return
        namespace = self.namespace(name)
        with closing(connect_to(self._text, namespace, block_bytes)) as client:
            skip_unless_room(client, num_bytes)
            try:
                yield self._text
            finally:
                leave(client, namespace)


def list_of(addresses: Sequence[str]) -> ServerList:
    """The servers of the values of `--server`: addresses, ranges, or one `file://`. Raises
    `ConfigError`."""
    is_file = len(addresses) == 1 and addresses[0].startswith(FILE)
    return read_list(addresses[0] if is_file else addresses)


def text_of(servers: ServerList) -> str:
    """The list in one word, as `connect` takes it."""
    head = ["copies=head"] if servers.copies_head else []
    if len(servers.members) == 1:
        head = []
    addresses = []
    for one in servers.members:
        options = [f"name={one.name}"] * bool(one.name) + [f"keys={one.keys}"] * bool(one.keys)
        addresses.append("?".join(filter(None, [one.endpoint, "&".join([*options, *head])])))
    return ",".join(addresses)


def skip_unless_room(client: Client, num_bytes: int) -> None:
    """Raise `Skipped` where blocks of `num_bytes` would evict others' from a server. All of them
    may lie on one of a fleet."""
    for one in each_of(client):
        memory = one.stats(timeout_s=PATIENCE_S).result().tiers["memory"]
        free = memory.budget_bytes - memory.used_bytes
        if free < num_bytes + num_bytes // 4 + 16 * MiB:
            raise Skipped(
                f"the server has {format_bytes(free)} of memory free, the blocks are "
                f"{format_bytes(num_bytes)} and need a quarter and 16 MiB more"
            )


def leave(client: Client, namespace: str) -> None:
    """Remove all blocks of a namespace from servers that keep running."""
    client.forget(namespace)
    client.clear(namespace, forget=True, timeout_s=PATIENCE_S).result()
