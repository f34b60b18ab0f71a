"""The settings of a server and of its tenants, checked before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from remote_server.errors import ConfigError
from remote_server.keys import TENANT_NAME, check_public_key, read_toml
from remote_server.protocol import SELF_TESTS
from remote_server.store.bucket.objects.client import check_url
from remote_server.store.bucket.packs.codecs import check_name
from remote_server.values import (
    ADMIN_DEFAULT,
    LANES_AUTO,
    Address,
    Days,
    Directory,
    File,
    GiB,
    KiB,
    MiB,
    Name,
    Seconds,
    Size,
    Url,
    admin_address,
    format_bytes,
    is_loopback,
    lanes_address,
    parse_bytes,
    with_scheme,
    wrong_server_name,
)

Admission = Literal["all", "twice"]
EvictionRule = Literal["learned", "lru"]
EventsFormat = Literal["map", "array"]
Compression = Literal["none", "zstd"]
LogLevel = Literal["debug", "info", "warning", "error"]

MAP: EventsFormat = "map"
ARRAY: EventsFormat = "array"

# Sixteen slabs of a page each would be 64 KiB; a smaller cache than this is a mistake.
MIN_MEMORY_BYTES = 1 * MiB

# The least in-flight limit with which the cache is of any use: some small blocks.
MIN_INFLIGHT_BYTES = 16 * KiB

MIN_PACK_BYTES, MAX_PACK_BYTES = 64 * KiB, 64 * MiB


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of one server. The constructor checks them and raises `ConfigError`."""

    bind: Address = "tcp://127.0.0.1:5757"
    """The address to listen on. Port `*` picks a free one, which the ready line names."""

    name: Name = ""
    """The name that lists of servers give this one: clients place blocks by it. With a settings
    file of several servers, which of them. Empty: the first label of the host's name."""

    memory: Size = 1 * GiB
    """Bytes of blocks kept in memory, all namespaces together. A hard budget."""

    disk: Directory = ""
    """A directory for blocks beyond memory, kept over restarts; the server's own, which no other
    user owns or can write to. Empty: none."""

    disk_bytes: Size = 16 * GiB
    """Bytes of files in `disk`, all namespaces together. A hard budget."""

    disk_write_rate: Size = 20 * MiB
    """Bytes per second written to `disk` on average, 0 for no limit. Unused writes are saved up to
    the size of the directory, and may be written at once. The default is 1.8 TB a day, the
    endurance of a device of 2 TB made for one drive write a day."""

    disk_admit: Admission = "all"
    """`all`: every new block is written, soon after its put; on a full disk those that `eviction`
    would keep there. `twice`: only those that are put or got again, which wears the device less; a
    killed server loses the other blocks."""

    eviction: EvictionRule = "learned"
    """`learned`: the blocks stay that are likeliest to be wanted again, as this server's requests
    show; the least recently used blocks go first while that finds more. `lru`: always so."""

    bucket: Url = ""
    """An object store below memory and disk, which servers share: `s3://bucket/prefix`, `gs://…`,
    `az://…`, or `file:///mnt/…` for a shared file system. Credentials and endpoints come from the
    variables that each store documents, as `AWS_ACCESS_KEY_ID`. Needs the extra
    `kvferry[bucket]`. Empty: none."""

    bucket_bytes: Size = 0
    """Bytes that all servers together keep in `bucket`, 0 for no limit. A soft budget: servers
    sweep the bucket from time to time."""

    bucket_write_rate: Size = 50 * MiB
    """Bytes per second that this server writes to `bucket` on average, 0 for no limit."""

    bucket_admit: Admission = "twice"
    """`twice`: what a second lookup finds is written, as packs of up to 1,024 tokens. `all`: every
    pack is written, soon after its last put."""

    bucket_days: Days = 7.0
    """Packs older than this are removed from `bucket`, 0 for never; one that is read in the last
    fifth of that time is written again. Set the bucket's own lifecycle rule to twice that, for the
    case that no server runs."""

    pack: Size = 16 * MiB
    """The most bytes of one object of `bucket`. All servers of a bucket need the same."""

    pack_compress: Compression = "none"
    """Compression of the rows of a pack, without loss: `none` or `zstd`, which needs the extra
    `kvferry[bucket]`. Servers of a bucket may differ in it."""

    drain_timeout_s: Seconds = 5.0
    """The time that the first SIGTERM gives streams and writes to finish."""

    populate: bool = True
    """Fault the memory in from the background, so that the first puts need not."""

    shared_memory: bool = True
    """Let clients on this host move blocks through shared memory instead of TCP."""

    keys: File = ""
    """The server's key file: connections are encrypted and only known keys are admitted. Made by
    `kvferry keys`. Needs `tenants`."""

    tenants: File = ""
    """A file of tenants, with their keys and quotas. Needs `keys`."""

    ttl_s: Seconds = 0.0
    """Blocks older than this expire, 0 for never. A tenant may have its own."""

    max_connections: int = 512
    """Connections at a time; an engine has four, and a few more while it starts."""

    lanes: Address = LANES_AUTO
    """The address of lanes, TCP connections that carry blocks past ZeroMQ, 1.2 to 1.4 times as
    fast, and 1.9 times with keys: `HOST:PORT`, `auto` for any free port beside `bind`, or `off`.
    Clients reach it at the host of their connection where HOST is `*`, else at HOST. With keys
    lanes are encrypted, by OpenSSL 3 with the certificate beside the keys; without either there
    are none. With `auto` a server without the C library has none, because they would be slow.
    Clients that cannot reach one use ZeroMQ."""

    max_inflight: Size = 0
    """Bytes of blocks that may be in flight to one client, or on lease to it; they are pinned. 0:
    half of the memory, and at least 256 MiB. Otherwise 16 KiB at least, and at least a block:
    namespaces of larger blocks are refused."""

    insecure: bool = False
    """Allow a bind that other machines can reach although nothing is encrypted or authenticated."""

    admin: Address = ADMIN_DEFAULT
    """The address of the admin HTTP: metrics, state, a page. Port `*` picks a free one, `off`
    disables it. When the default address is taken, the server runs without."""

    admin_token_file: File = ""
    """A file with the token for `POST /clear`, `/prefetch` and `/drain`, and for everything where
    other machines can reach it. Empty: these three are refused."""

    events: Address = ""
    """An address at which routers subscribe to what becomes readable here and what leaves, in the
    format of vLLM's KV events: `tcp://127.0.0.1:5759`. On the port above it they request the last
    10,000 batches again. Of all tenants: with `tenants` only this machine may reach it. Empty: no
    events, which cost nothing then."""

    events_format: EventsFormat = MAP
    """`map`: events are maps, as vLLM publishes them. `array`: their fields have places, as older
    vLLM published them and some routers read them. Anything that the documents of these do not list
    is left out then."""

    log_level: LogLevel = "info"
    """`debug`, `info`, `warning` or `error`."""

    def __post_init__(self) -> None:
        for name in ("bind", "events"):
            if address := getattr(self, name):
                msgspec.structs.force_setattr(self, name, with_scheme(address))
        if self.name and (wrong := wrong_server_name(self.name)):
            raise ConfigError(f"name: the server {wrong}")
        if self.memory < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"memory: {self.memory} bytes is below the least useful budget, "
                f"{format_bytes(MIN_MEMORY_BYTES)}"
            )
        if self.disk_bytes < 0:
            raise ConfigError(f"disk_bytes: {self.disk_bytes} bytes")
        for name in ("disk_write_rate", "bucket_write_rate"):
            if (rate := getattr(self, name)) < 0:
                raise ConfigError(f"{name}: {rate} bytes per second; 0 means no limit")
        for field in msgspec.structs.fields(type(self)):
            words = get_args(field.type) if get_origin(field.type) is Literal else ()
            if words and (word := getattr(self, field.name)) not in words:
                raise ConfigError(f"{field.name}: {word!r:.80} is none of {', '.join(words)}")
        self._check_bucket()
        if not 0 <= self.drain_timeout_s <= 3600:
            raise ConfigError(f"drain_timeout_s: {self.drain_timeout_s}: 0 to 3600 seconds")
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
                "`kvferry keys` makes both files"
            )
        if not 0 <= self.ttl_s < float("inf"):
            raise ConfigError(f"ttl_s: {self.ttl_s} seconds; 0 means no limit")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections: {self.max_connections} admits no connection")
        lanes = lanes_address(self.lanes)
        if lanes and not (lanes.is_loopback or self.insecure or self.keys):
            raise ConfigError(
                f"lanes: {self.lanes} can be reached from other machines, and without keys nothing "
                "on a lane is encrypted; pass --insecure if that network is yours alone"
            )
        if self.max_inflight != 0 and self.max_inflight < MIN_INFLIGHT_BYTES:
            raise ConfigError(
                f"max_inflight: {self.max_inflight} bytes: below {MIN_INFLIGHT_BYTES} no client "
                "could have a block; 0 is the default"
            )
        self._check_events()
        if not is_loopback(self.bind) and not (self.keys or self.insecure):
            raise ConfigError(
                f"bind: {self.bind} can be reached from other machines, and without keys nothing "
                "on the wire is encrypted or authenticated; make keys with `kvferry keys DIR "
                "TENANT`, and pass --keys and --tenants, or --insecure if that network is yours "
                "alone"
            )

    def _check_events(self) -> None:
        if not self.events or is_loopback(self.events, "events"):
            return
        where = f"events: {self.events} can be reached from other machines, and events"
        if self.tenants:
            raise ConfigError(
                f"{where} show the keys of all tenants; use an address of this machine, as "
                "tcp://127.0.0.1:5759"
            )
        if not self.insecure:
            raise ConfigError(
                f"{where} are neither encrypted nor authenticated; pass --insecure if that network "
                "is yours alone"
            )

    def _check_bucket(self) -> None:
        if self.bucket:
            check_url(self.bucket)
        if self.bucket_bytes < 0:
            raise ConfigError(f"bucket_bytes: {self.bucket_bytes} bytes; 0 means no limit")
        if not 0 <= self.bucket_days < 36_500:
            raise ConfigError(f"bucket_days: {self.bucket_days}; 0 means no limit")
        if not MIN_PACK_BYTES <= self.pack <= MAX_PACK_BYTES:
            limits = f"{format_bytes(MIN_PACK_BYTES)} to {format_bytes(MAX_PACK_BYTES)}"
            raise ConfigError(f"pack: {format_bytes(self.pack)}: {limits}")
        check_name(self.pack_compress)


GROUPS: Mapping[str, tuple[str, ...]] = {
    "storage": (
        "memory", "populate", "disk", "disk_bytes", "disk_write_rate", "disk_admit", "eviction",
        "ttl_s",
    ),
    "network": (
        "bind", "name", "lanes", "shared_memory", "max_connections", "max_inflight", "insecure",
    ),
    "keys and tenants": ("keys", "tenants"),
    "bucket": (
        "bucket", "bucket_bytes", "bucket_write_rate", "bucket_admit", "bucket_days", "pack",
        "pack_compress",
    ),
    "monitoring and end": (
        "admin", "admin_token_file", "events", "events_format", "log_level", "drain_timeout_s",
    ),
}  # fmt: skip
"""The settings as help pages and documents show them."""


# Each has an arena and queues of its own, and a turn in every turn of the loop.
MAX_TENANTS = 64

# Created and removed by every engine as it starts, so no list of namespaces has to name them.
ALWAYS_ALLOWED = (f"{SELF_TESTS}canary/",)


@dataclass(frozen=True)
class TenantConfig:
    """One tenant and its quotas, in bytes. Without tenants one stands for all, with an empty
    name."""

    name: str
    memory: int
    disk: int = 0
    keys: frozenset[str] = frozenset()
    namespaces: tuple[str, ...] = ()
    """Prefixes, one of which each of its namespaces must have; empty: any name."""
    namespace_memory: int = 0
    """The most that one namespace may take of `memory`; 0: all of it."""
    ttl_s: float = 0.0
    """Blocks older than this are expired; 0: never."""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Those of the namespaces that its clients may use."""
        return (*self.namespaces, *ALWAYS_ALLOWED) if self.namespaces else ("",)


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file, as it is written there."""

    keys: list[str]
    memory: int | str | None = None
    disk: int | str = 0
    namespaces: list[str] = []
    namespace_memory: int | str = 0
    ttl_s: float | None = None


def read_tenants(config: ServerConfig) -> list[TenantConfig]:
    """Those of `config.tenants`; without that, one for all clients.

    Raises `ConfigError` with the file, the tenant and the mistake.
    """
    if not config.tenants:
        disk = config.disk_bytes if config.disk else 0
        return [TenantConfig("", config.memory, disk, ttl_s=config.ttl_s)]
    entries = _read_entries(config.tenants)
    memory = _divide_memory(entries, config)
    tenants = [
        _tenant(name, entry, memory[name], config, f"tenants: {config.tenants}: {name}")
        for name, entry in entries.items()
    ]
    if sum(tenant.disk for tenant in tenants) > config.disk_bytes:
        raise ConfigError(
            f"tenants: {config.tenants}: together the tenants have "
            f"{format_bytes(sum(tenant.disk for tenant in tenants))} of disk, and --disk-bytes is "
            f"{format_bytes(config.disk_bytes)}"
        )
    return tenants


def keys_of_tenants(path: str) -> dict[str, str]:
    """Every public key of the file, and its tenant. Raises `ConfigError`."""
    return {key: name for name, entry in _read_entries(path).items() for key in entry.keys}


def _read_entries(path: str) -> dict[str, _Entry]:
    found = read_toml(
        path, "tenants", 0o022, f"others could add their keys to it: chmod go-w {path}"
    )
    if not 0 < len(found) <= MAX_TENANTS:
        raise ConfigError(f"tenants: {path} has {len(found)} tenants, not 1 to {MAX_TENANTS}")
    entries: dict[str, _Entry] = {}
    owners: dict[str, str] = {}
    for name, table in found.items():
        where = f"tenants: {path}: {name}"
        entries[name] = entry = _entry(name, table, where)
        for key in entry.keys:
            try:
                check_public_key(key)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            if owners.setdefault(key, name) != name:
                raise ConfigError(
                    f"{where}: it has a key of {owners[key]}: a key belongs to one tenant"
                )
    return entries


def _entry(name: str, table: Any, where: str) -> _Entry:
    if not TENANT_NAME.fullmatch(name):
        raise ConfigError(f"{where}: a tenant's name is up to 64 of a-z, 0-9, - and _")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: write a table, [{name}], with its keys")
    try:
        entry = msgspec.convert(table, _Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not entry.keys:
        raise ConfigError(f"{where}: it has no keys, so no client can be this tenant")
    if "" in entry.namespaces:
        raise ConfigError(f"{where}: an empty name in namespaces allows all: omit the list")
    return entry


def _divide_memory(entries: Mapping[str, _Entry], config: ServerConfig) -> dict[str, int]:
    """Each tenant's part of the memory: as given in its table, or an equal part of the rest."""
    path = config.tenants
    memory = {
        name: parse_bytes(entry.memory, f"tenants: {path}: {name}: memory")
        for name, entry in entries.items()
        if entry.memory is not None
    }
    left = config.memory - sum(memory.values())
    if left < 0:
        raise ConfigError(
            f"tenants: {path}: together the tenants have {format_bytes(sum(memory.values()))}, and "
            f"--memory is {format_bytes(config.memory)}"
        )
    others = [name for name in entries if name not in memory]
    memory |= {name: left // len(others) for name in others}
    for name, share in memory.items():
        if share < MIN_MEMORY_BYTES:
            raise ConfigError(
                f"tenants: {path}: {name}: {format_bytes(share)} of memory is below the least "
                f"useful, {format_bytes(MIN_MEMORY_BYTES)}"
            )
    return memory


def _tenant(
    name: str, entry: _Entry, memory: int, config: ServerConfig, where: str
) -> TenantConfig:
    disk = parse_bytes(entry.disk, f"{where}: disk")
    namespace_memory = parse_bytes(entry.namespace_memory, f"{where}: namespace_memory")
    if disk and not config.disk:
        raise ConfigError(f"{where}: it has disk, and this server has none: --disk DIR")
    if not 0 <= namespace_memory <= memory:
        raise ConfigError(
            f"{where}: namespace_memory is {format_bytes(namespace_memory)} of "
            f"{format_bytes(memory)}"
        )
    ttl_s = config.ttl_s if entry.ttl_s is None else entry.ttl_s
    if not 0 <= ttl_s < float("inf"):
        raise ConfigError(f"{where}: ttl_s is {ttl_s}; 0 means no limit")
    return TenantConfig(
        name, memory, disk, frozenset(entry.keys), tuple(entry.namespaces), namespace_memory, ttl_s
    )
