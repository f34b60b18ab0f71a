"""Address of the admin HTTP: the setting, and the socket made from it."""

import errno
import re
import socket
from typing import NamedTuple

from remote_server.address import is_loopback_number
from remote_server.errors import ConfigError

OFF = "off"
DEFAULT = "http://127.0.0.1:5758"

# Connections that the kernel keeps until they are accepted.
BACKLOG = 1024


class Address(NamedTuple):
    """A host name or address without brackets, and a port; 0 is any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        host = self.host
        return host in ("localhost", "::1") or is_loopback_number(host)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def parse(setting: str) -> Address | None:
    """The address in `admin`; None for `off`. Raises `ConfigError` when it is neither."""
    if setting == OFF:
        return None
    match = re.fullmatch(r"http://(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z_.-]+):(\*|[0-9]{1,5})", setting)
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65536):
        raise ConfigError(
            f"admin: {setting!r} is not an address; write it like {DEFAULT}, "
            "http://127.0.0.1:* for any free port, or off"
        )
    return Address(match[1].strip("[]"), 0 if match[2] == "*" else int(match[2]))


def listen(address: Address) -> socket.socket:
    """A socket that listens there; connections wait in it until they are accepted.

    Raises `ConfigError` when the address is not available.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        hint = "choose another address, or off"
        if error.errno == errno.EADDRINUSE:
            hint = f"another process listens there; {hint}"
        raise ConfigError(f"admin: {address.url}: {error.strerror or error}; {hint}") from error
    return listener
