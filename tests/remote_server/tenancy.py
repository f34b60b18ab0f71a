"""A folder of real key files, servers that use it, and peers that hold its keys."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from wire_peer import Peer

from remote_server.keys import make_keys, read_client_keys, read_server_keys
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB


class Tenancy:
    """Keys of tenants `a` and `b`, one server at a time, and peers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = zmq.Context()
        make_keys(folder, ["a", "b"])
        self.server: Server | None = None

    def client_file(self, name: str) -> str:
        return str(self.folder / f"client-{name}.key")

    def public_key(self, name: str) -> str:
        return read_client_keys(self.client_file(name)).public.decode()

    def write(self, **tables: str) -> None:
        """The tenants file anew: `a="memory = 4"` gives tenant a its key and that."""
        text = ""
        for name, rest in tables.items():
            keys = "" if "keys =" in rest else f'keys = ["{self.public_key(name)}"]\n'
            text += f"[{name}]\n{keys}{rest}\n"
        path = self.folder / "tenants.new"
        path.write_text(text)
        path.chmod(0o600)
        path.replace(self.folder / "tenants.toml")  # another inode: noticed whatever the clock

    def config(self, **settings) -> ServerConfig:
        fields = {"memory": 8 * MiB, "populate": False, **settings}
        return ServerConfig(
            bind="tcp://127.0.0.1:*", keys=str(self.folder / "server.key"),
            tenants=str(self.folder / "tenants.toml"), **fields,
        )  # fmt: skip

    def start(self, clock=None, **settings) -> Server:
        assert self.server is None
        config = self.config(**settings)
        self.server = Server(config, clock) if clock else Server(config)
        self.server.__enter__()
        return self.server

    def stop(self) -> None:
        server, self.server = self.server, None
        server.__exit__(None, None, None)
        for tenant in server.tenants.values():
            tenant.store.tier_stack.check()
            assert tenant.store.counters["refused_internal"] == 0

    def peer(self, name: str, server_key: bytes | None = None, **options) -> Peer:
        """A DEALER that connects with the keys in the file of `name`."""
        keys = read_client_keys(self.client_file(name))
        return Peer(
            self.context, self.server.endpoint, curve_serverkey=server_key or keys.server,
            curve_publickey=keys.public, curve_secretkey=keys.secret, **options,
        )  # fmt: skip

    @property
    def server_key(self) -> bytes:
        return read_server_keys(str(self.folder / "server.key")).public


@pytest.fixture
def tenancy(tmp_path: Path) -> Iterator[Tenancy]:
    tenancy = Tenancy(tmp_path / "keys")
    yield tenancy
    if tenancy.server is not None:
        tenancy.stop()
    tenancy.context.destroy(linger=0)
