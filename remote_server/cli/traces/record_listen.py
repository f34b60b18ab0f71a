"""A server that stores nothing, for recording the requests of an engine that has no other."""

from remote_server.errors import ConfigError
from remote_server.protocol import MAX_FRAME_BYTES
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import is_loopback, with_scheme

MEMORY_BYTES = 16 * MAX_FRAME_BYTES
"""Mapped, so that blocks of any size may be declared. Nothing is ever written there, so it takes no
memory."""


class NoStore(Server):
    """Every lookup finds nothing, and every put is declined. It does not drain: an engine would
    offer the blocks again and again, to the server that it takes to start soon."""

    def __init__(self, address: str) -> None:
        """`address` is one of this host. Raises `ConfigError`."""
        address = with_scheme(address)
        if not is_loopback(address, "--listen"):
            raise ConfigError(
                f"--listen: {address} can be reached from other machines, and this server has no "
                "keys: record on the engine's host"
            )
        super().__init__(
            ServerConfig(
                bind=address, memory=MEMORY_BYTES, populate=False, eviction="lru", admin="off"
            )
        )

    def start(self) -> None:
        super().start()
        for tenant in self.tenants.values():
            tenant.handlers.stores = False
