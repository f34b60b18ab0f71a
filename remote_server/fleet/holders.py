"""Holders: which server was last found to have a key, for the get that follows a lookup."""

import threading
from collections.abc import Iterable, Sequence
from itertools import islice, repeat

from remote_server.fleet.server import FleetServer

# About 100 bytes each besides the keys. A key that is not remembered is asked of its first home.
MOST_KEYS = 65_536


class Holders:
    """A bounded memory of keys, the oldest forgotten first. For any thread."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._servers: dict[bytes, FleetServer] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._servers)

    def get(self, key: bytes) -> FleetServer | None:
        return self._servers.get(key)

    def learn(self, server: FleetServer, keys: Iterable[bytes]) -> None:
        """`server` has `keys`."""
        with self._lock:
            self._servers.update(zip(keys, repeat(server)))
            excess = len(self._servers) - self._most_keys
            for key in list(islice(self._servers, max(0, excess))):
                del self._servers[key]

    def forget(self, keys: Sequence[bytes]) -> None:
        """No server has `keys`."""
        with self._lock:
            for key in self._servers.keys() & keys:
                del self._servers[key]

    def lost(self, server: FleetServer) -> None:
        """`server` has left the fleet."""
        with self._lock:
            self._servers = {k: one for k, one in self._servers.items() if one is not server}
