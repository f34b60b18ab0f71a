"""`kvferry serve --all`: every server of a settings file on this host, a process each.

The settings of all servers are read and compared before the first process starts.
"""

import argparse
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from remote_server.cli.output import print_error, print_lines
from remote_server.cli.serving.supervisor import Supervisor
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import read_list
from remote_server.plain_text import without_secrets
from remote_server.process_limits import check_memory_fits
from remote_server.protocol.codec import ascii_json
from remote_server.server import settings
from remote_server.server.config import ServerConfig
from remote_server.server.settings import Chosen
from remote_server.values import admin_address, format_bytes

_ANY_HOST = ("*", "0.0.0.0", "::")
_LOOPBACK_NAMES = {"localhost": "127.0.0.1", "lo": "127.0.0.1"}

CLIENT_KEYS = "/path/client.key"
"""In the list for engines, where a server has keys: the server does not know the client's file."""


def run(flags: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """The exit status: 0 after a signal, 1 when a server has failed, 2 when two of them cannot run
    beside each other. Raises `ConfigError`."""
    path = flags.settings or environment.get(f"{settings.PREFIX}SETTINGS", "")
    if flags.name:
        raise ConfigError(f"--name {flags.name}: --all starts every server; omit one of the two")
    if not path:
        raise ConfigError("--all: it needs --settings FILE, with a [servers.NAME] for each server")
    fleet = _fleet_of(path, flags, environment)
    if flags.print_config:
        for name, one in fleet.items():
            print_lines(f"[servers.{name}]", *one.as_toml().split("\n"), "")
        return 0
    configs = {name: one.config for name, one in fleet.items()}
    if wrong := conflicts(configs):
        for line in wrong:
            print_error(f"{path}: {line}")
        return 2
    check_memory_fits(
        sum(config.memory for config in configs.values()), setting=f"{path}: memory of all servers"
    )
    engines = list_for_engines(configs)
    arguments = settings.arguments_of(flags)
    commands = {name: [*_python(), *arguments, "--name", name] for name in configs}
    supervisor = Supervisor(commands, max(one.drain_timeout_s for one in configs.values()))

    def started(pids: Mapping[str, int]) -> None:
        width = max(map(len, configs))
        for name, pid in pids.items():
            supervisor.report(f"{name:<{width}}  pid {pid}  {_summary(configs[name])}")
        supervisor.report(f'for engines: "server": {ascii_json(engines)}')

    return supervisor.run(started)


def conflicts(configs: Mapping[str, ServerConfig]) -> list[str]:
    """A sentence for everything that two of these servers cannot both have on one host."""
    found = [
        f"{name}: bind: {config.bind} has no fixed port, and engines need one in their list"
        for name, config in configs.items()
        if config.bind.endswith(":*")
    ]
    sockets = [one for name, config in configs.items() for one in _sockets(name, config)]
    for one, other in itertools.combinations(sockets, 2):
        if one.port == other.port and _overlap(one.host, other.host):
            found.append(
                f"{one.server} and {other.server} both listen on port {one.port}: "
                f"{one.setting} = {one.value} and {other.setting} = {other.value}"
            )
    folders = [(name, _real(config.disk)) for name, config in configs.items() if config.disk]
    for (name, folder), (other_name, other_folder) in itertools.combinations(folders, 2):
        if folder == other_folder:
            found.append(f"{name} and {other_name} both have disk = {folder}")
        elif folder in other_folder.parents or other_folder in folder.parents:
            found.append(
                f"{name} has disk = {folder} and {other_name} has {other_folder}: one is inside "
                "the other"
            )
    return found


def list_for_engines(configs: Mapping[str, ServerConfig]) -> list[str]:
    """The value of an engine's setting `server`. Raises `ConfigError` when a name cannot be in
    it."""
    engines = [
        f"tcp://{_reachable(config.bind)}?"
        + (f"keys={CLIENT_KEYS}&" if config.keys else "")
        + f"name={name}"
        for name, config in configs.items()
    ]
    read_list(engines, "the list for engines")
    return engines


def _fleet_of(
    path: str, flags: argparse.Namespace, environment: Mapping[str, str]
) -> dict[str, Chosen]:
    fleet = {}
    for name in settings.names_in(path):
        own = argparse.Namespace(**{**vars(flags), "name": name})
        try:
            fleet[name] = settings.choose(own, environment)
        except ConfigError as error:
            raise ConfigError(f"[servers.{name}]: {error}") from error
    if not fleet:
        raise ConfigError(f"--all: {path} has no [servers.NAME]")
    return fleet


class _Socket(NamedTuple):
    """An address that a server listens on, and the setting that gives it."""

    server: str
    setting: str
    value: str
    host: str
    port: str


def _sockets(name: str, config: ServerConfig) -> Iterator[_Socket]:
    host, _, port = config.bind.removeprefix("tcp://").rpartition(":")
    if port != "*":
        yield _Socket(name, "bind", config.bind, host.strip("[]"), port)
    admin = admin_address(config.admin)
    if admin is not None and admin.port:
        yield _Socket(name, "admin", config.admin, admin.host, str(admin.port))


def _overlap(host: str, other: str) -> bool:
    """Whether two hosts of addresses to listen on include one address, as far as they show it."""
    host, other = (_LOOPBACK_NAMES.get(one, one) for one in (host, other))
    return host == other or host in _ANY_HOST or other in _ANY_HOST


def _real(folder: str) -> Path:
    return Path(os.path.realpath(folder))


def _reachable(bind: str) -> str:
    """The host and port of `bind` for a client. An address of all interfaces, or the name of an
    interface, becomes the name of this host."""
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    bare = host.strip("[]")
    if bare == "lo":
        return f"127.0.0.1:{port}"
    is_address = "." in bare or ":" in bare or bare == "localhost"
    return f"{host if is_address and bare not in _ANY_HOST else socket.gethostname()}:{port}"


def _summary(config: ServerConfig) -> str:
    parts = [config.bind, f"memory {format_bytes(config.memory)}"]
    if config.disk:
        parts.append(f"disk {format_bytes(config.disk_bytes)} in {config.disk}")
    if config.bucket:
        parts.append(f"bucket {without_secrets(config.bucket)}")
    return "  ".join([*parts, f"admin {config.admin}"])


def _python() -> list[str]:
    """This interpreter with the module of one server. The working directory is searched for it only
    where this process searches it."""
    safe = [] if {"", os.getcwd()}.intersection(sys.path) else ["-P"]
    return [sys.executable, *safe, "-m", "remote_server"]
