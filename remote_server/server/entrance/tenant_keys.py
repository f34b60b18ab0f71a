"""The public keys of tenants that are in force."""

import logging
import os
from collections.abc import Container

from remote_server.errors import ConfigError
from remote_server.server.config import keys_of_tenants

log = logging.getLogger(__name__)


class TenantKeys:
    """The public keys of the tenants file, read again when it has changed.

    Keys can therefore be added or withdrawn while the server runs. A file that cannot be read
    changes nothing, and is logged once.
    """

    def __init__(self, path: str, names: Container[str]) -> None:
        """Only tenants in `names` exist here. Raises `ConfigError`."""
        self._path = path
        self._names = names
        self._seen = _fingerprint(path)
        self.tenants = keys_of_tenants(path)
        """The tenant of each key."""
        self.former: dict[str, str] = {}
        """Keys that were withdrawn. Their connections may still be open."""

    def reload(self) -> None:
        seen = _fingerprint(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            found = keys_of_tenants(self._path)
        except ConfigError as error:
            log.error("the changed tenants file is not used: %s", error)
            return
        except Exception:  # the server keeps the known keys, whatever the file holds
            log.exception("the changed tenants file cannot be read")
            return
        new = {name for name in found.values() if name not in self._names}
        if new:
            log.warning("tenants %s are added when the server starts again", ", ".join(new))
        self.former |= self.tenants
        self.tenants = {key: name for key, name in found.items() if name in self._names}
        log.info("%d tenant keys are in force", len(self.tenants))


def _fingerprint(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
