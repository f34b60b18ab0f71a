"""Lists of servers: the forms of the setting `server`, and a list in a file that may change.

    tcp://10.0.0.7:5757                                        one server
    tcp://kvferry-{0..9}.kvferry:5757?keys=/path/client.key    ten, by names of DNS
    tcp://10.0.0.{7..9}:5757?name=cache-{1..3}                 three, by addresses
    ["tcp://a:5757", "tcp://b:5757?copies=head"]               two
    file:///etc/kvferry/servers                                a line each; `#` begins a comment

Clients hash the names of servers, so a server that comes back under another address keeps its
blocks' places. A name is therefore a property of the list and of the server, not of the address.
"""

import ipaddress
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from remote_server.errors import ConfigError
from remote_server.keys import read_small
from remote_server.plain_text import without_secrets
from remote_server.values import ServerAddress, server_address

log = logging.getLogger(__name__)

FILE = "file://"

MOST_MEMBERS = 1024
"""Limit of a list: a prompt is looked up on a few servers, but each has its connections."""

EXAMPLE = "tcp://kvferry-{0..9}.kvferry:5757"
_RANGE = re.compile(r"\{([^{}]*)\}")
_MOST_RANGES = 16
_NUMBERS = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")


class Member(NamedTuple):
    """One server of a list."""

    name: str
    """Unique in the list. Empty only in a list of one."""

    endpoint: str
    """`tcp://host:port`, unique in the list."""

    keys: str = ""
    """A client key file; empty for a server without keys."""


class ServerList(NamedTuple):
    """The servers of one setting, checked."""

    members: tuple[Member, ...]
    """At least one, in the order of their names."""

    copies_head: bool = False
    """Runs of the first 8,192 tokens are put to both of their homes: `copies=head` behind any
    server of the list."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for lists of the same names: those clients place alike."""
        return xxhash.xxh3_64_hexdigest("\n".join(one.name for one in self.members).encode())


def read_list(setting: str | Sequence[str], what: str = "server") -> ServerList:
    """The list in `setting`: an address, an address with a range, a `file://` path, or a sequence
    of addresses. Raises `ConfigError`, one sentence with `what`, the wrong part and a right
    example; an empty `what` is omitted.

    A member without `name=` has the first label of its host name. A list that consists of one
    plain address has the name in it or none, because one server needs no name to be found by.
    """
    if isinstance(setting, str) and setting.startswith(FILE):
        return _from_file(setting, what)[0]
    texts = [setting] if isinstance(setting, str) else list(setting)
    if len(texts) == 1 and _RANGE.search(texts[0]) is None:
        address = server_address(texts[0], what)
        return ServerList((Member(address.name, *address[:2]),), address.copies_head)
    return _list_of(((text, what) for text in texts), what)


class WatchedList:
    """A list that follows its file. For one thread; never waits for anything but the file."""

    def __init__(self, setting: str | Sequence[str], what: str = "server") -> None:
        """Raises `ConfigError`, as `read_list`."""
        self._setting = setting
        self._what = what
        self._path = ""
        self._seen: _Version | None = None
        self._logged = ""
        if isinstance(setting, str) and setting.startswith(FILE):
            self._path = _path_of(setting, what)
            self.current, self._seen = _from_file(setting, what)
        else:
            self.current = read_list(setting, what)

    @property
    def follows_a_file(self) -> bool:
        """Whether it may change."""
        return bool(self._path)

    def changed(self) -> ServerList | None:
        """The new list, which is then also `current`, when the file holds another one than before;
        else None. A file that cannot be read, or is wrong, changes nothing and is logged once.

        It costs one `stat` while the file is as it was. Call it every few seconds. Replace the file
        by a rename, as a ConfigMap does: a file that is half written may be read.
        """
        if not self._path:
            return None
        try:
            if _version(os.stat(self._path)) == self._seen:
                return None
            found, self._seen = _from_file(FILE + self._path, self._what)
        except OSError as error:
            self._keep(f"{_at(self._what)}cannot read {self._path}: {error.strerror}")
            return None
        except ConfigError as error:
            self._keep(str(error))
            return None
        self._logged = ""
        if found == self.current:
            return None
        self.current = found
        return found

    def _keep(self, why: str) -> None:
        self._seen = None  # the file is read again until it is right
        if why != self._logged:
            self._logged = why
            log.warning("%s; the list before is kept", without_secrets(why))


_Version = tuple[int, int, int, int]


def _version(status: os.stat_result) -> _Version:
    """Another one when a file was written, or another took its place, also behind a symlink."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _path_of(setting: str, what: str) -> str:
    path = setting.removeprefix(FILE)
    if not path.startswith("/") or "?" in path:
        wrong = (
            "a '?' belongs behind a server in the file"
            if "?" in path
            else "the path is not absolute"
        )
        raise _error(setting, what, wrong, "file:///etc/kvferry/servers")
    return path


def _from_file(setting: str, what: str) -> tuple[ServerList, _Version]:
    path = _path_of(setting, what)
    file = read_small(path, what or "server")
    try:
        lines = file.data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_at(what)}{path}: byte {error.start} is not UTF-8") from None
    texts = [
        (text, f"{_at(what)}{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if (text := line.partition("#")[0].strip())
    ]
    return _list_of(texts, f"{_at(what)}{path}"), _version(file.status)


def _list_of(texts: Iterable[tuple[str, str]], what: str) -> ServerList:
    """The list of `texts`, each with the place that its error names. All are named."""
    members: dict[str, Member] = {}
    endpoints: dict[str, str] = {}
    copies_head = False
    for text, where in texts:
        for one in _expanded(text, where):
            address = server_address(one, where)
            copies_head |= address.copies_head
            name = address.name or _first_label(address, where)
            if name in members:
                wrong = f"{members[name].endpoint} has the name {name!r} too"
                raise _error(one, where, wrong, f"{address.endpoint}?name=another")
            if same := endpoints.get(address.endpoint.lower()):
                raise _error(one, where, f"it is in the list already, as {same!r}", EXAMPLE)
            members[name] = Member(name, address.endpoint, address.keys)
            endpoints[address.endpoint.lower()] = name
            if len(members) > MOST_MEMBERS:
                raise _error(one, where, f"more than {MOST_MEMBERS:,} servers", EXAMPLE)
    if not members:
        raise ConfigError(f"{_at(what)}no server in the list; write one like {EXAMPLE}")
    return ServerList(tuple(sorted(members.values())), copies_head)


def _expanded(text: str, where: str) -> Iterator[str]:
    """`text` for each number of its ranges, which are counted together."""
    parts = _RANGE.split(text)
    if len(parts) // 2 > _MOST_RANGES:
        raise _error(text, where, f"it has more than {_MOST_RANGES} ranges", EXAMPLE)
    ranges = [_numbers(part, text, where) for part in parts[1::2]]
    if len({len(one) for one in ranges}) > 1:
        counts = " and ".join(str(len(one)) for one in ranges)
        raise _error(text, where, f"its ranges have {counts} numbers, and need as many each",
                     "tcp://10.0.0.{7..9}:5757?name=cache-{1..3}")  # fmt: skip
    for numbers in zip(*ranges, strict=True) if ranges else [()]:
        pairs = zip(parts[::2], [*numbers, ""], strict=True)
        yield "".join(literal + number for literal, number in pairs)


def _numbers(part: str, text: str, where: str) -> list[str]:
    """The numbers of a range such as `0..9`, or `00..11` with leading zeros."""
    match = _NUMBERS.fullmatch(part)
    if match is None:
        raise _error(text, where, f"'{{{part}}}' is no range of numbers", EXAMPLE)
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < MOST_MEMBERS:
        wrong = (
            "ends before it begins" if last < first else f"has more than {MOST_MEMBERS:,} numbers"
        )
        raise _error(text, where, f"'{{{part}}}' {wrong}", EXAMPLE)
    is_padded = any(len(one) > 1 and one[0] == "0" for one in match.groups())
    width = max(map(len, match.groups())) if is_padded else 0
    return [f"{number:0{width}}" for number in range(first, last + 1)]


def _first_label(address: ServerAddress, where: str) -> str:
    """The name of a server in a list that names its host only."""
    host = address.endpoint.removeprefix("tcp://").rpartition(":")[0]
    label = host.partition(".")[0]
    if host.startswith("[") or label == "localhost" or _is_address(host):
        wrong = f"{host} gives no name, and a server in a list needs one"
        raise _error(address.endpoint, where, wrong, f"{address.endpoint}?name=cache-1")
    return label


def _is_address(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return host.replace(".", "").isdigit()
    return True


def _at(what: str) -> str:
    return f"{what}: " if what else ""


def _error(text: str, where: str, wrong: str, example: str) -> ConfigError:
    return ConfigError(f"{_at(where)}{text!r:.200}: {wrong}; write it like {example}")
