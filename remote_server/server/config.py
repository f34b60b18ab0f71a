"""The settings of a server, checked before anything starts."""

import re
from pathlib import Path

import msgspec

from remote_server.address import ADMIN_DEFAULT, admin_address, is_loopback
from remote_server.errors import ConfigError
from remote_server.sizes import GiB, KiB, MiB, Size, format_bytes

_ADMIT = ("all", "twice")
_LOG_LEVELS = ("debug", "info", "warning", "error")

# Sixteen slabs of a page each would be 64 KiB; a smaller cache than this is a mistake.
MIN_MEMORY_BYTES = 1 * MiB

# The least in-flight limit with which the cache is of any use: some small blocks.
MIN_INFLIGHT_BYTES = 16 * KiB

# memory.limit_in_bytes of an unlimited cgroup (v1) is a number near 2**63.
_UNLIMITED = 1 << 60


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of one server. The constructor checks them and raises `ConfigError`."""

    bind: str = "tcp://127.0.0.1:5757"
    """The address to listen on. Port `*` picks a free one; `Server.endpoint` names it."""

    memory: Size = 1 * GiB
    """Bytes of blocks kept in memory, all namespaces together. A hard budget."""

    disk: str = ""
    """A directory for blocks beyond memory, kept over restarts; the server's own, which no other
    user owns or can write to. Empty: none."""

    disk_bytes: Size = 16 * GiB
    """Bytes of files in `disk`, all namespaces together. A hard budget."""

    disk_write_rate: Size = 20 * MiB
    """Bytes per second written to `disk` on average, 0 for no limit. Unused writes are saved up to
    the size of the directory, and may be written at once. The default is 1.8 TB a day, the
    endurance of a device of 2 TB made for one drive write a day."""

    disk_admit: str = "all"
    """`all`: every new block is written, soon after its put. `twice`: only those that are put or
    got again, which wears the device less; a killed server loses the other blocks."""

    drain_timeout_s: float = 5.0
    """The time that the first SIGTERM gives streams and writes to finish."""

    populate: bool = True
    """Fault the memory in from the background, so that the first puts need not."""

    shared_memory: bool = True
    """Let clients on this host move blocks through shared memory instead of TCP."""

    keys: str = ""
    """The server's key file: connections are encrypted and only known keys are admitted. Made by
    `kvferry keys`. Needs `tenants`."""

    tenants: str = ""
    """A file of tenants, with their keys and quotas. Needs `keys`."""

    ttl_s: float = 0.0
    """Blocks older than this expire, 0 for never. A tenant may have its own."""

    max_connections: int = 512
    """Connections at a time; an engine has four, and a few more while it starts."""

    max_inflight: Size = 0
    """Bytes of blocks that may be in flight to one client, or on lease to it; they are pinned. 0:
    half of the memory, and at least 256 MiB. Otherwise 16 KiB at least, and at least a block:
    namespaces of larger blocks are refused."""

    insecure: bool = False
    """Allow a bind that other machines can reach although nothing is encrypted or authenticated."""

    admin: str = ADMIN_DEFAULT
    """The address of the admin HTTP: metrics, state, a page. Port `*` picks a free one, `off`
    disables it. When the default address is taken, the server runs without."""

    admin_token_file: str = ""
    """A file with the token for `POST /clear`, `/prefetch` and `/drain`, and for everything where
    other machines can reach it. Empty: these three are refused."""

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
                f"disk_write_rate: {self.disk_write_rate} bytes per second; 0 means no limit"
            )
        if self.disk_admit not in _ADMIT:
            raise ConfigError(f"disk_admit: {self.disk_admit!r} is none of {', '.join(_ADMIT)}")
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError(
                f"drain_timeout_s: {self.drain_timeout_s} is outside 0 to 3600 seconds"
            )
        if self.log_level not in _LOG_LEVELS:
            raise ConfigError(f"log_level: {self.log_level!r} is none of {', '.join(_LOG_LEVELS)}")
        admin = admin_address(self.admin)
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
            raise ConfigError(f"ttl_s: {self.ttl_s} seconds; 0 means no limit")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections: {self.max_connections} admits no connection")
        if self.max_inflight != 0 and self.max_inflight < MIN_INFLIGHT_BYTES:
            raise ConfigError(
                f"max_inflight: {self.max_inflight} bytes: below {MIN_INFLIGHT_BYTES} no client "
                "could have a block; 0 is the default"
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
    """Raise `ConfigError` when `memory` is more than this machine or container can give.

    Without this check the kernel's OOM killer would end the server hours later, when the cache is
    full. `setting` is the name of the setting in the error.
    """
    available = _mem_available(proc)
    if memory > available:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} requested, but only {format_bytes(available)} is "
            "available on this machine (MemAvailable)"
        )
    limit = _cgroup_limit(proc, cgroups)
    if memory > limit:
        raise ConfigError(
            f"{setting}: {format_bytes(memory)} requested, but the memory limit of this container "
            f"or cgroup is {format_bytes(limit)}"
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
