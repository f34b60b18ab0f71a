"""The answers of `kvferry init`: from flags, from questions on a terminal, else defaults."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from remote_server.errors import ConfigError
from remote_server.fleet.server_list import ServerList, read_list
from remote_server.keys import TENANT_NAME
from remote_server.process_limits import most_memory
from remote_server.server.config import ServerConfig
from remote_server.store.bucket.objects.client import check_url
from remote_server.values import GiB, MiB, format_bytes, is_loopback, parse_bytes, written_size

PORT = 5757
HERE = "127.0.0.1"
SYSTEMD, KUBERNETES = "systemd", "kubernetes"
GPU, CPU = "gpu", "cpu"

MOST_REPLICAS = 1000
LEAST_DISK_BYTES = 64 * MiB

POD_DISK = "/var/lib/kvferry/blocks"
"""In a pod: a folder of its volume, whose root belongs to root."""


@dataclass(frozen=True)
class Answers:
    """What a host or a cluster shall run. The constructor checks it and raises `ConfigError`."""

    model: str
    device: str
    target: str
    hosts: tuple[str, ...]
    """Where the cache servers run: `HERE` alone is beside the engine."""

    memory: int
    pool: int
    disk: str
    disk_bytes: int
    bucket: str
    tenants: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model is missing: the model that vLLM serves")
        if self.bucket:
            check_url(self.bucket)
        if self.disk and not self.disk.startswith("/"):
            raise ConfigError(f"--disk {self.disk}: a path from the root is wanted")
        if self.disk and self.disk_bytes < LEAST_DISK_BYTES:
            raise ConfigError(f"--disk-bytes: {format_bytes(self.disk_bytes)} is below the least "
                              f"useful disk, {format_bytes(LEAST_DISK_BYTES)}")  # fmt: skip
        check_path(self.disk, "--disk")
        ServerConfig(memory=self.memory)
        for name in self.tenants:
            if not TENANT_NAME.fullmatch(name):
                raise ConfigError(f"--keys {name!r:.80}: not a tenant's name")
        if self.is_reachable and not self.tenants:
            raise ConfigError("--keys is missing: other machines can reach these servers, so each "
                              "engine or team needs a key; one name is enough")  # fmt: skip
        self.servers()

    @property
    def bind(self) -> str:
        """The address to listen on, of every server."""
        version_6 = any(host.startswith("[") for host in self.hosts)
        if self.is_reachable:
            return f"tcp://{'[::]' if version_6 else '0.0.0.0'}:{PORT}"
        return f"tcp://{'[::1]' if version_6 else HERE}:{PORT}"

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can reach the servers."""
        return self.target == KUBERNETES or any(not is_loopback(f"tcp://{host}:{PORT}")
                                                for host in self.hosts)  # fmt: skip

    def servers(self) -> ServerList:
        """The servers by name."""
        return read_list(self.addresses(), "--hosts")

    def addresses(self, keys: str = "") -> list[str]:
        """The addresses in the engine's setting `server`. `keys` is the client key file there."""
        option = f"?keys={keys}" if keys else ""
        if self.target == KUBERNETES:
            last = len(self.hosts) - 1
            pods = f"kvferry-{{0..{last}}}.kvferry" if last else "kvferry-0.kvferry"
            return [f"tcp://{pods}:{PORT}{option}"]
        found = []
        for number, host in enumerate(self.hosts):
            named = len(self.hosts) > 1 and not re.match("[A-Za-z_]", host)
            options = [f"keys={keys}"] * bool(keys) + [f"name=cache-{number}"] * named
            found.append(f"tcp://{host}:{PORT}" + ("?" + "&".join(options) if options else ""))
        return found


def check_path(path: str, what: str) -> None:
    """Raise `ConfigError` where a shell, a unit of systemd or an address would read a path as
    something else."""
    if not re.fullmatch(r"[\w/.@+-]*", path):
        raise ConfigError(f"{what} {path!r:.80}: letters, digits and / . _ - @ + only, as units, "
                          "shells and addresses have this path in them")  # fmt: skip


def answers_of(flags: argparse.Namespace, ask: Callable[[str, str], str] | None) -> Answers:
    """Of the flags; `ask(question, default)` is called for those that are missing. Raises
    `ConfigError`."""

    def answer(given: str | None, question: str, default: str) -> str:
        if given is not None or ask is None:
            return default if given is None else given
        return ask(question, default).strip()

    model = answer(flags.model, "Model, as vLLM serves it", "")
    device = answer(flags.device, f"Runs on {GPU} or {CPU}", _device())
    if device not in (GPU, CPU):
        raise ConfigError(f"--device {device!r:.80}: {GPU} or {CPU}")
    hosts = _hosts_of(
        answer(flags.hosts, "Hosts of cache servers, or their number; 1: the engine's own", "1"),
        flags.target,
    )
    memory = parse_bytes(answer(flags.memory, "Memory of each server", _share_of_memory(4)),
                         "--memory")  # fmt: skip
    disk = answer(flags.disk, "Folder for blocks on disk, or none", "none")
    bucket = answer(flags.bucket, "Bucket that servers share, or none", "none")
    alone = flags.target != KUBERNETES and hosts == (HERE,)  # any other host has keys, even here
    names = answer(flags.keys, "Names of tenants with a key, or none", "none" if alone
                   else "engines")  # fmt: skip
    return Answers(
        model=model,
        device=device,
        target=flags.target,
        hosts=hosts,
        memory=memory,
        pool=parse_bytes(flags.cpu_pool or _share_of_memory(8), "--cpu-pool"),
        disk=POD_DISK if _or_none(disk) and flags.target == KUBERNETES else _or_none(disk),
        disk_bytes=parse_bytes(flags.disk_bytes, "--disk-bytes"),
        bucket=_or_none(bucket),
        tenants=tuple(re.split(r"[,\s]+", names)) if _or_none(names) else (),
    )


def _hosts_of(text: str, target: str) -> tuple[str, ...]:
    if not re.fullmatch("[0-9]{1,4}", text):
        if target == KUBERNETES:
            raise ConfigError(f"--hosts {text!r:.80}: on Kubernetes their number is wanted")
        return tuple(re.split(r"[,\s]+", text.strip()))
    number = int(text)
    if not 0 < number <= MOST_REPLICAS:
        raise ConfigError(f"--hosts {number}: 1 to {MOST_REPLICAS}")
    if number > 1 and target == SYSTEMD:
        raise ConfigError(f"--hosts {number}: name them, as cache-a,cache-b: engines need their "
                          "addresses")  # fmt: skip
    return tuple(f"kvferry-{at}" for at in range(number)) if target == KUBERNETES else (HERE,)


def _or_none(text: str) -> str:
    return "" if text.lower() in ("", "none", "no", "-") else text


def _device() -> str:
    return GPU if any(Path(name).exists() for name in ("/dev/nvidia0", "/dev/kfd")) else CPU


def _share_of_memory(part: int) -> str:
    """That part of this host's memory, in whole GiB and one at least."""
    return written_size(max(most_memory() // part // GiB, 1) * GiB)
