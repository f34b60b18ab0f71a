"""What an operator may choose, checked once, before anything starts."""

import re
from pathlib import Path

import msgspec

from remote_server import http_address as admin_address
from remote_server.address import is_loopback
from remote_server.errors import ConfigError
from remote_server.sizes import GiB, KiB, MiB, Size, format_bytes

_ADMIT = ("all", "twice")
_LOG_LEVELS = ("debug", "info", "warning", "error")

# Sixteen slabs of a page each would be 64 KiB; below this a cache is a mistake, not a choice.
MIN_MEMORY_BYTES = 1 * MiB

# What one client must be able to have on its way for the cache to be of any use: some small blocks.
MIN_INFLIGHT_BYTES = 16 * KiB

# memory.limit_in_bytes of an unlimited cgroup (v1) is a number near 2**63.
_UNLIMITED = 1 << 60


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of one server. Building one checks it: raises `ConfigError`."""

    bind: str = "tcp://127.0.0.1:5757"
    """Where to listen. Port `*` picks a free one; `Server.endpoint` names it."""

    memory: Size = 1 * GiB
    """Bytes of blocks kept in memory, all namespaces together. A hard budget."""

    disk: str = ""
    """A directory for blocks beyond memory, still there after a restart; the server's own, which no
    other user owns or can write to. Empty: none."""

    disk_bytes: Size = 16 * GiB
    """Bytes of files in `disk`, all namespaces together. A hard budget."""

    disk_write_rate: Size = 20 * MiB
    """Bytes per second written to `disk` on average, 0 for no limit. What would fill the directory
    may be saved up and written at once. The default is 1.8 TB a day, what a device of 2 TB made
    for one drive write a day stands."""

    disk_admit: str = "all"
    """`all`: every new block is written, soon after its put. `twice`: only those that are put or
    got again, which wears the device less; a killed server has lost the others."""

    drain_timeout_s: float = 5.0
    """How long the first SIGTERM lets streams and writes finish."""

    populate: bool = True
    """Fault the memory in from the background, so that the first puts do not pay for it."""

    shared_memory: bool = True
    """Let clients on this host move blocks through shared memory instead of TCP."""

    keys: str = ""
    """The server's key file: connections are encrypted and only known keys are let in. Made by
    `kvferry keys`. Needs `tenants`."""

    tenants: str = ""
    """Who may connect with which keys, and what each may have. Needs `keys`."""

    ttl_s: float = 0.0
    """Blocks older than this are gone, 0 for never. A tenant may have its own."""

    max_connections: int = 512
    """Connections at a time; an engine has four, and a few more while it starts."""

    max_inflight: Size = 0
    """Bytes of blocks that may be on their way to one client, or be lent to it; they are pinned.
    0: half of the memory, and at least 256 MiB. Otherwise 16 KiB at least, and at least a block:
    namespaces of larger blocks are refused."""

    insecure: bool = False
    """Allow a bind that other machines can reach although nothing is encrypted or authenticated."""

    admin: str = admin_address.DEFAULT
    """Where to answer people and their tools over HTTP: metrics, state, a page. Port `*` picks a
    free one, `off` does without. The default one, when it is taken, is done without as well."""

    admin_token_file: str = ""
    """A file with the token that `POST /clear`, `/prefetch` and `/drain` take, and everything
    where other machines can reach it. Empty: these three are refused."""

    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""

    def __post_init__(self) -> None:
        if self.memory < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"memory: {self.memory} bytes is below the least useful budget, "
                f"{format_bytes(MIN_MEMORY_BYTES)}"
            )
        if self.disk_bytes < 0:
            raise ConfigError(f"disk_bytes: {self.disk_bytes} bytes")
        if self.disk_write_rate < 0:
            raise ConfigError(
                f"disk_write_rate: {self.disk_write_rate} bytes per second; 0 is without limit"
            )
        if self.disk_admit not in _ADMIT:
            raise ConfigError(f"disk_admit: {self.disk_admit!r} is none of {', '.join(_ADMIT)}")
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError(
                f"drain_timeout_s: {self.drain_timeout_s} is outside 0 to 3600 seconds"
            )
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} is none of {', '.join(_LOG_LEVELS)}")
        admin = admin_address.parse(self.admin)
        if admin and not (admin.is_loopback or self.admin_token_file or self.insecure):
            raise ConfigError(
                f"admin: {self.admin} can be reached from other machines: set admin_token_file, "
                "or pass --insecure if that network is yours alone"
            )
        if bool(self.keys) != bool(self.tenants):
            there, missing = ("keys", "tenants") if self.keys else ("tenants", "keys")
            raise ConfigError(
                f"{there}: {getattr(self, there)!r} needs --{missing} as well; "
                "python -m remote_server.keys makes both files"
            )
        if not 0 <= self.ttl_s < float("inf"):
            raise ConfigError(f"ttl_s: {self.ttl_s} seconds; 0 is without end")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections: {self.max_connections} lets nobody in")
        if self.max_inflight != 0 and self.max_inflight < MIN_INFLIGHT_BYTES:
            raise ConfigError(
                f"max_inflight: {self.max_inflight} bytes: less than {MIN_INFLIGHT_BYTES} lets no "
                "client have a block; 0 is the default"
            )
        if not is_loopback(self.bind) and not (self.keys or self.insecure):
            raise ConfigError(
                f"bind: {self.bind} can be reached from other machines, and without keys nothing "
                "on the wire is encrypted or authenticated; make keys with python -m "
                "remote_server.keys DIR TENANT and pass --keys and --tenants, or pass --insecure "
                "if that network is yours alone"
            )


def check_memory_fits(
    memory: int,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    *,
    setting: str = "memory",
) -> None:
    """Raise `ConfigError` when `memory` is more than this machine, or container, can give.

    `setting` is what the operator called it.

    Found at start rather than by the kernel's OOM killer, hours later, when the cache is full.
    """
    available = _mem_available(proc)
    if memory > available:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} asked, but only {format_bytes(available)} is "
            "available on this machine (MemAvailable)"
        )
    limit = _cgroup_limit(proc, cgroups)
    if memory > limit:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} asked, but the memory limit of this container or "
            f"cgroup is {format_bytes(limit)}"
        )


def _mem_available(proc: Path) -> int:
    try:
        text = (proc / "meminfo").read_text()
    except OSError:
        return _UNLIMITED  # not Linux: nothing to compare with
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * KiB if match else _UNLIMITED


def _cgroup_limit(proc: Path, cgroups: Path) -> int:
    """The tightest limit of our cgroup and its ancestors, version 2 or 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    limits = [_UNLIMITED]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_relative_to(root):
                limits.append(_read_limit(folder / name))
    return min(limits)


def _read_limit(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file here, or the word "max"
        return _UNLIMITED
