"""The public keys of the tenants file, as they are now and as they were."""

import logging
import os
from collections.abc import Container

from remote_server.errors import ConfigError
from remote_server.server.tenant_config import keys_of_tenants

log = logging.getLogger(__name__)


class KnownKeys:
    """The public keys of the tenants file, read again when it has changed.

    So a key is added or withdrawn while the server runs. A file that cannot be read changes
    nothing, and is said once.
    """

    def __init__(self, path: str, names: Container[str]) -> None:
        """Only tenants in `names` have a place here. Raises `ConfigError`."""
        self._path = path
        self._names = names
        self._seen = _fingerprint(path)
        self.tenants = keys_of_tenants(path)
        """Each key and whose it is."""
        self.former: dict[str, str] = {}
        """Those that were withdrawn. Connections that were made with them may still be open."""

    def look_again(self) -> None:
        seen = _fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            found = keys_of_tenants(self._path)
        except ConfigError as error:
            log.error("the tenants file has changed and is not used: %s", error)
            return
        except Exception:  # whatever is in it, the server goes on with what it knows
            log.exception("the tenants file has changed and cannot be read")
            return
        new = {name for name in found.values() if name not in self._names}
        if new:
            log.warning("tenants %s get a place when the server starts again", ", ".join(new))
        self.former |= self.tenants
        self.tenants = {key: name for key, name in found.items() if name in self._names}
        log.info("%d keys of tenants are known now", len(self.tenants))


def _fingerprint(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
