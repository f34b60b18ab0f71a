"""The server that a benchmark measures: one started for it, or one that runs already."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from benchmarks.harness.runner import Skipped
from benchmarks.remote_kv_cache.baseline.ferry_client import PATIENCE_S, connect, server_for
from remote_server.client import RemoteClient
from remote_server.values import MiB, format_bytes, is_loopback, server_address

ELSEWHERE = "the server is on another machine, where this program runs nothing"


class Target:
    """Without addresses each measurement starts a server of its own. A running one keeps nothing
    of a measurement, which has a namespace of its own there and evicts no other block."""

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        """`addresses` as in an engine's setting. Raises `Skipped` for more than one."""
        if len(addresses) > 1:
            raise Skipped("one server at a time is measured")
        self._addresses = tuple(addresses)
        self._suffix = f"-{secrets.token_hex(4)}" if addresses else ""

    @property
    def runs_already(self) -> bool:
        return bool(self._addresses)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the server is on another machine, so that copies and sockets of this one are no
        bounds of it."""
        return not all(is_loopback(server_address(text).endpoint) for text in self._addresses)

    def namespace(self, name: str) -> str:
        return name + self._suffix

    @contextmanager
    def server(self, name: str, num_bytes: int, block_bytes: int) -> Iterator[str]:
        """The address of a server that holds `num_bytes` without evicting, for `namespace(name)`.
        Raises `Skipped` when a running one cannot be used."""
        if not self._addresses:
            with server_for(num_bytes, block_bytes) as started:
                yield started.endpoint
            return
        (address,) = self._addresses
        namespace = self.namespace(name)
        with closing(connect(address, namespace, block_bytes)) as client:
            skip_unless_room(client, num_bytes)
            try:
                yield address
            finally:
                leave(client, namespace)


def skip_unless_room(client: RemoteClient, num_bytes: int) -> None:
    """Raise `Skipped` where blocks of `num_bytes` would evict others' from the server."""
    memory = client.stats(timeout_s=PATIENCE_S).result().tiers["memory"]
    free = memory.budget_bytes - memory.used_bytes
    if free < num_bytes + num_bytes // 4 + 16 * MiB:
        raise Skipped(
            f"the server has {format_bytes(free)} of memory free, the blocks are "
            f"{format_bytes(num_bytes)} and need a quarter and 16 MiB more"
        )


def leave(client: RemoteClient, namespace: str) -> None:
    """Remove all blocks of a namespace from a server that keeps running."""
    client.forget(namespace)
    client.clear(namespace, forget=True, timeout_s=PATIENCE_S).result()
