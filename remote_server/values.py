"""Values as operators write them, parsed only here: sizes, numbers, addresses.

    8GiB                                           bytes: of memory, of a disk, of a block
    tcp://10.0.0.7:5757                            where a client connects; or 10.0.0.7:5757
    tcp://10.0.0.7:5757?keys=/path/client.key      the same, with the key file for that server
    tcp://10.0.0.7:5757?name=a&copies=head         the same, in a list of servers
    tcp://127.0.0.1:*                              where a server listens, on any free port
    http://127.0.0.1:5758                          where the admin HTTP listens; or 127.0.0.1:5758

TCP is the only transport to a server. On the server's own host blocks go through shared memory
beside it, so an `ipc://` address would change only the small messages.
"""

import errno
import ipaddress
import math
import re
import socket
from collections.abc import Container
from fractions import Fraction
from typing import Annotated, NamedTuple

import msgspec

from remote_server.errors import ConfigError

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_UNITS = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"[ \t]*([0-9]{1,18})(\.[0-9]{1,18})?[ \t]*([a-zA-Z]*)[ \t]*")

# Limit of sizes in files and messages: 63 bits.
MOST_BYTES = 1 << 63


def parse_bytes(value: int | str, setting: str = "size") -> int:
    """`"512MiB"`, `"1GB"`, `"1073741824"` or an int, as bytes. KiB is 1024, kB is 1000. A part of a
    byte, as in 1.1GiB, is dropped; 1.5 bytes are no size.

    Raises `ConfigError` naming `setting` and the value.
    """
    match = _SIZE.fullmatch(str(value))
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None or (match[2] and unit == 1):
        raise ConfigError(
            f"{setting}: {value!r:.80} is not a size; write it like 512MiB, 4GiB or 1073741824"
        )
    num_bytes = int(Fraction(match[1] + (match[2] or "")) * unit)
    if num_bytes >= MOST_BYTES:
        raise ConfigError(f"{setting}: {value!r:.80} is more than there can be")
    return num_bytes


def format_bytes(count: int) -> str:
    """1.5 GiB: for people; one decimal."""
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def written_size(count: int) -> str:
    """24GiB, as an operator writes it; the number where that is not exact."""
    text = format_bytes(count).replace(".0 ", "")
    return str(count) if " " in text or count % MiB else text


Size = Annotated[int, msgspec.Meta(ge=0, extra={"metavar": "SIZE"})]
"""Bytes; an operator may write `8GiB`."""

# The kinds of settings that help pages show by a word of their own.
Seconds = Annotated[float, msgspec.Meta(extra={"metavar": "SECONDS"})]
Days = Annotated[float, msgspec.Meta(extra={"metavar": "DAYS"})]
Address = Annotated[str, msgspec.Meta(extra={"metavar": "ADDRESS"})]
Url = Annotated[str, msgspec.Meta(extra={"metavar": "URL"})]
Name = Annotated[str, msgspec.Meta(extra={"metavar": "NAME"})]
File = Annotated[str, msgspec.Meta(extra={"metavar": "FILE"})]
Directory = Annotated[str, msgspec.Meta(extra={"metavar": "DIR"})]


# Beyond any count here, and within 64 bits.
MOST_DIGITS = 18

_WHOLE = re.compile(rf"[+-]?[0-9]{{1,{MOST_DIGITS}}}")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def whole_number(value: object) -> int:
    """An int as it is, or its decimal digits. Raises `ValueError` for anything else: text with
    other digits or underscores, a fraction, a boolean, more than `MOST_DIGITS` digits."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS:
        return value
    raise ValueError("not a whole number")


def float_or_nan(text: str) -> float:
    """What Python's `float` makes of `text`; nan of other texts."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def finite_number(value: object) -> float:
    """A number as it is, or its decimal text. Raises `ValueError` for anything else: nan, inf,
    other digits, underscores, a boolean. A negative zero is zero."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(whole_number(value))
    if not isinstance(value, float) or not abs(value) < float("inf"):
        raise ValueError("not a finite number")
    return value + 0.0


EXAMPLE = "tcp://127.0.0.1:5757"

_SCHEME = "tcp://"
_ANY = "*"
_HOST = re.compile(r"[0-9A-Za-z_]([0-9A-Za-z._-]*[0-9A-Za-z_])?")
_PORT = re.compile(r"[0-9]{1,5}")


class ServerAddress(NamedTuple):
    """Address of a server, and the keys to connect with."""

    endpoint: str
    """`tcp://host:port`."""

    keys: str = ""
    """A client key file; empty for a server without keys."""

    name: str = ""
    """The server's name, when the address has one."""

    copies_head: bool = False
    """The address has `copies=head`, which is for the whole list."""


_OPTIONS = ("keys", "name", "copies")
_COPIES = "head"


def with_scheme(address: str) -> str:
    """`address`, with `tcp://` in front where it has no scheme."""
    return address if "://" in address else _SCHEME + address


def server_address(text: str, setting: str = "server") -> ServerAddress:
    """`tcp://host:port`, or `host:port` for short, and behind a `?` any of `keys=FILE`, `name=NAME`
    and `copies=head`, with `&` between them. One setting for all, because they are for the one
    server that it names. Raises `ConfigError`, as `check_endpoint`."""
    endpoint, question, query = text.partition("?")
    endpoint = with_scheme(endpoint)
    check_endpoint(endpoint, setting)
    options: dict[str, str] = {}
    for part in query.split("&") if question else ():
        option, _, value = part.partition("=")
        if wrong := _wrong_option(option, value, options):
            example = "name=cache-1" if option == "name" else "keys=/path/client.key"
            example = "copies=head" if option == "copies" else example
            raise _error(text, setting, f"'?{query}' behind the port {wrong}",
                         f"{EXAMPLE}?{example}")  # fmt: skip
        options[option] = value
    return ServerAddress(
        endpoint, options.get("keys", ""), options.get("name", ""), "copies" in options
    )


def _wrong_option(option: str, value: str, before: Container[str]) -> str:
    """The end of a sentence, or "" for a right one. `before` are the options in front of it."""
    if option not in _OPTIONS or (option == "keys" and not value):
        known = f": {option!r:.80} is none of {', '.join(_OPTIONS)}" if before else ""
        return f"is no key file{known}"
    if option in before:
        return f"has {option}= twice"
    if option == "copies" and value != _COPIES:
        return f"has copies={value}, and only copies={_COPIES} is known"
    return wrong_server_name(value) if option == "name" else ""


_SERVER_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]{0,62}")


def wrong_server_name(name: str) -> str:
    """Why a server cannot have this name, as the end of a sentence; "" when it can."""
    if _SERVER_NAME.fullmatch(name):
        return ""
    return (
        f"has the name {name!r:.80}: a name has 1 to 63 ASCII letters, digits, '-', '_' and '.', "
        "and begins with a letter, a digit or '_'"
    )


def check_endpoint(text: str, setting: str) -> None:
    """Raise `ConfigError` when a client cannot connect to `text`: one sentence with `setting`, the
    whole address and its wrong part. An empty `setting` is omitted."""
    host, port = _host_and_port(text, setting)
    if host == _ANY or port == _ANY:
        which = "host" if host == _ANY else "port"
        raise _error(text, setting, f"{which} '*' is for a server that listens, not for a client")


def is_loopback(bind: str, setting: str = "bind") -> bool:
    """Whether only this machine can reach `bind`, a server's listening address, whose host and port
    may be `*`. Raises `ConfigError` that names the `setting`, as `check_endpoint`."""
    host, _ = _host_and_port(bind, setting)
    return host in ("localhost", "[::1]", "lo") or is_loopback_number(host)


def is_loopback_number(host: str) -> bool:
    """Whether `host` is an IPv4 address of loopback, in digits of ASCII."""
    return re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def _host_and_port(text: str, setting: str) -> tuple[str, str]:
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise _error(text, setting, f"{_SCHEME} in front is missing")
    if scheme == "ipc":
        raise _error(text, setting, "ipc:// is not supported, and on one host blocks go through "
                     "shared memory beside tcp:// anyway")  # fmt: skip
    if scheme + separator != _SCHEME:
        raise _error(text, setting, f"{scheme}:// is not {_SCHEME}")
    host, colon, port = rest.rpartition(":")
    if not colon or port.endswith("]"):
        raise _error(text, setting, "the port is missing")
    if not host:
        raise _error(text, setting, "the host is missing")
    if wrong := _wrong_host(host) or _wrong_port(port):
        raise _error(text, setting, wrong)
    return host, port


def _wrong_host(host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            return f"host {host!r} is not an IPv6 address"
    elif ":" in host and "/" not in host:
        return f"host {host!r} has a colon; an IPv6 address stands in brackets, as in [::1]"
    elif host != _ANY and not _HOST.fullmatch(host):
        return f"host {host!r} is neither a name nor an address"
    return ""


def _wrong_port(port: str) -> str:
    if port == _ANY or (_PORT.fullmatch(port) and 0 < int(port) < 65536):
        return ""
    number, slash, path = port.partition("/")
    if slash and not _wrong_port(number):
        return f"{slash + path!r} behind the port is no part of an address"
    return f"port {port!r} is not a number from 1 to 65535"


def _error(text: str, setting: str, wrong: str, example: str = EXAMPLE) -> ConfigError:
    where = f"{setting}: " if setting else ""
    return ConfigError(f"{where}{text!r}: {wrong}; write it like {example}")


ADMIN_OFF = "off"
ADMIN_DEFAULT = "http://127.0.0.1:5758"

# Connections that the kernel keeps until they are accepted.
BACKLOG = 1024


class AdminAddress(NamedTuple):
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


def admin_address(setting: str) -> AdminAddress | None:
    """The address in `admin`; None for `off`. Raises `ConfigError` when it is neither."""
    if setting == ADMIN_OFF:
        return None
    match = re.fullmatch(
        r"(?:http://)?(\[[0-9a-fA-F:.]+\]|[0-9A-Za-z_.-]+):(\*|[0-9]{1,5})", setting
    )
    if match is None or (match[2] != "*" and not 0 < int(match[2]) < 65536):
        raise ConfigError(
            f"admin: {setting!r} is not an address; write it like 127.0.0.1:5758, 127.0.0.1:* for "
            "any free port, or off"
        )
    return AdminAddress(match[1].strip("[]"), 0 if match[2] == "*" else int(match[2]))


LANES_AUTO, LANES_OFF = "auto", "off"


class LanesAddress(NamedTuple):
    """Where lanes begin: a host name or address without brackets, empty for all of this machine,
    and a port; 0 is any free one."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or is_loopback_number(self.host)

    @property
    def reachable_host(self) -> str:
        """The host for clients; empty where it is that of the server's own address."""
        return "" if self.host in ("0.0.0.0", "::") else self.host

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host or _ANY
        return f"{host}:{self.port}"


def lanes_address(setting: str) -> LanesAddress | None:
    """The address in `lanes`; None for `auto` and `off`. Raises `ConfigError` when it is none."""
    if setting in (LANES_AUTO, LANES_OFF):
        return None
    host, colon, port = setting.rpartition(":")
    if not (colon and host) or _wrong_host(host) or _wrong_port(port):
        raise ConfigError(
            f"lanes: {setting!r:.80} is not an address; write it like 10.0.0.7:5759, *:* for any "
            f"free port of this machine, {LANES_AUTO} or {LANES_OFF}"
        )
    return LanesAddress("" if host == _ANY else host.strip("[]"), 0 if port == _ANY else int(port))


def lanes_beside(endpoint: str) -> LanesAddress:
    """Any free port of the host of `endpoint`, where the server listens."""
    return LanesAddress(_host_and_port(endpoint, "bind")[0].strip("[]"), 0)


def listen(address: AdminAddress) -> socket.socket:
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
