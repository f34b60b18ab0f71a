"""EachServer: the same request to every server of a list, and the replies by name.

For commands of operators. Nothing is placed or merged here, and a server that does not answer costs
only its own reply: the others' come within the same time.
"""

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from remote_server.client import ClientConfig, IoThread, RemoteClient
from remote_server.errors import DeadlineExceeded, KVFerryError, ServerUnavailable
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import PROTOCOL_VERSION, StatsReply, other_protocol, wrong_server

T = TypeVar("T")

_LOOK_S = 0.01
_CLOSE_S = 1.0
# A request ends by its own deadline; this is for an I/O thread that has no processor.
_GRACE_S = 1.0


@dataclass
class Replies(Generic[T]):
    """The replies to one request, by the server's name, in the order of the list."""

    received: dict[str, T] = field(default_factory=dict)

    failed: dict[str, str] = field(default_factory=dict)
    """The servers without a reply, each with the reason."""


class EachServer:
    """A client for each server, all on one I/O thread. For one thread."""

    def __init__(self, servers: ServerList, config: ClientConfig) -> None:
        """Begin to connect. `config` is that of each client but for its server. Raises
        `ConfigError`, for a key file for example."""
        self.names = tuple(one.name for one in servers.members)
        self._clients: dict[str, RemoteClient] = {}
        self._io = IoThread()
        try:
            for one in servers.members:
                own = replace(config, endpoint=one.endpoint, keys=one.keys, server_name=one.name)
                self._clients[one.name] = RemoteClient(own, io=self._io)
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return when every server is ready, or cannot be before `timeout_s`."""
        ends_by = time.monotonic() + timeout_s
        while time.monotonic() < ends_by:
            if all(one.ready or one.absent for one in self._clients.values()):
                return
            time.sleep(_LOOK_S)

    def stats(self, timeout_s: float, *, fingerprints: bool = False) -> Replies[StatsReply]:
        """The statistics of each server. One of another protocol, or that has another name than
        the list gives it, counts as failed."""
        replies = self.ask(
            lambda one: one.stats(fingerprints=fingerprints, timeout_s=timeout_s), timeout_s
        )
        for name, reply in [*replies.received.items()]:
            if reply.protocol != PROTOCOL_VERSION:
                replies.failed[name] = other_protocol(reply.protocol, PROTOCOL_VERSION)
            elif name and reply.name not in ("", name):
                replies.failed[name] = wrong_server(reply.name, name)
            if name in replies.failed:
                del replies.received[name]
        return replies

    def ask(
        self,
        call: Callable[[RemoteClient], "Future[T]"],
        timeout_s: float,
        names: Collection[str] | None = None,
    ) -> Replies[T]:
        """The replies to `call`, which has `timeout_s` as its own limit, of the servers `names`, or
        of all."""
        asked = {
            name: call(client)
            for name, client in self._clients.items()
            if names is None or name in names
        }
        wait(asked.values(), timeout_s + _GRACE_S)
        replies = Replies[T]()
        for name, future in asked.items():
            try:
                replies.received[name] = future.result(0)
            except TimeoutError:
                replies.failed[name] = f"no answer within {timeout_s:g} s"
            except (DeadlineExceeded, ServerUnavailable) as error:
                replies.failed[name] = str(error)
            except KVFerryError as error:
                replies.failed[name] = f"refused: {error}"
        return replies

    def close(self) -> None:
        """End every request and the thread. Idempotent."""
        for client in self._clients.values():
            client.close(0)
        self._io.close(_CLOSE_S)


@contextmanager
def each_server(
    servers: ServerList, config: ClientConfig, timeout_s: float
) -> Iterator[EachServer]:
    """Those servers, connected within `timeout_s` as far as they can be."""
    each = EachServer(servers, config)
    try:
        each.wait_until_ready(timeout_s)
        yield each
    finally:
        each.close()
