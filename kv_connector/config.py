"""Settings of the connector, checked once at start.

The settings are the keys of `kv_connector_extra_config`. Those of `RemoteConfig` are also the keys
of a `secondary_tiers` entry when the remote tier is used bare.
"""

import copy
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from remote_server.client import CacheClient, ClientConfig, RemoteClient
from remote_server.errors import ConfigError
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.server_list import FILE, WatchedList, read_list
from remote_server.plain_text import forbidden_in, plain
from remote_server.values import parse_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TIER_CLASS = "RemoteTier"
SPEC_CLASS = "FerrySpec"

REPLACED = frozenset({"wait_budget_ms", "lookup_timeout_ms", "load_stall_ms", "load_timeout_ms"})
"""Former settings: fixed times, right for no two engines."""

Milliseconds = Annotated[float, Meta(gt=0, le=600_000)]
Config = TypeVar("Config", bound="RemoteConfig")


class RemoteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of the remote server, and limits on its use."""

    server: str | list[str] | None = None
    """Address of the cache server, `tcp://host:port`. For a server with keys append the client
    key file: `tcp://host:port?keys=/path/client.key`. Several servers: a list of addresses, a
    range such as `tcp://kvferry-{0..9}.kvferry:5757`, or `file:///path` with a line for each.
    Without an address only the CPU pool is used."""

    namespace: str = ""
    """Operator's part of the namespace: engines with different values never share a block."""

    patience: Annotated[float, Meta(ge=0, le=1000)] = 0.1
    """Longest wait of a request for the server, in all, as a share of the time that the engine
    would take to compute what the server may have, by its own recent speed. Lookups and loads
    count, a busy engine does not. A load goes on while its blocks come faster than they are
    computed. The wait is at least a few round trips, 20 to 100 ms, and most of an engine step."""

    max_wait_ms: Milliseconds = 5_000
    """Upper limit on that wait, whatever computing takes."""

    put_timeout_ms: Milliseconds = 5_000
    """A put that takes longer is given up; until then its rows are pinned in the pool."""

    window: int | str = "16MiB"
    """Bytes requested over TCP and not yet received, over all loads of an engine."""

    transport: str = "auto"
    """`auto` uses shared memory when the server is on this host and TCP otherwise; `tcp` and
    `shm` allow only that one."""

    integrity: bool = True
    """Checksums of blocks. Turn them off only to measure their cost."""

    break_even: bool = True
    """Compute a prefix when recent measurements show that loading it would take longer."""

    kv_events: bool = False
    """Events of the servers' blocks among those that `--kv-events-config` publishes to routers, and
    the tokens and hashes of every block that enters the CPU pool."""

    def __post_init__(self) -> None:
        if self.server is not None:
            read_list(self.server)
        if not parse_bytes(self.window, "window"):
            raise ConfigError(f"window={self.window!r}: no byte could be received; omit it")
        if wrong := forbidden_in(self.namespace):
            raise ConfigError(
                f"namespace={plain(self.namespace)!r} has the character {wrong}: control "
                "and format characters and line separators are not allowed"
            )
        if self.transport not in ("auto", "tcp", "shm"):
            raise ConfigError(f"transport={self.transport!r}: choose 'auto', 'tcp' or 'shm'")


class ConnectorConfig(RemoteConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of the connector. Every one has a safe default."""

    cpu_pool: int | str = "1GiB"
    """Memory for the CPU pool, shared by all workers of the engine."""

    blocks_per_row: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Engine blocks that are stored, found and sent as one row. Aim at 0.5 to 4 MiB a row. Models
    with sliding windows or recurrent states accept only 1."""

    eviction: str = "lru"
    """Eviction policy of a full pool: `lru` or `arc`."""

    store_answers: bool = True
    """Store the blocks of generated tokens too, so that the next turn of a chat finds them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_bytes(self.cpu_pool, "cpu_pool")
        if self.eviction not in ("lru", "arc"):
            raise ConfigError(f"eviction={self.eviction!r}: choose 'lru' or 'arc'")

    def tier_settings(self) -> dict[str, Any]:
        """The settings of the remote tier."""
        return {name: getattr(self, name) for name in RemoteConfig.__struct_fields__}

    def for_vllm(self) -> dict[str, Any]:
        """These settings as keys of vLLM's tiering spec."""
        extra: dict[str, Any] = {
            "spec_name": SPEC_CLASS,
            "spec_module_path": "kv_connector.spec",
            "cpu_bytes_to_use": parse_bytes(self.cpu_pool, "cpu_pool"),
            "blocks_per_chunk": self.blocks_per_row,
            "eviction_policy": self.eviction,
            "offload_prompt_only": not self.store_answers,
            "self_describing_kv_events": self.kv_events,
            "secondary_tiers": [],
        }
        if self.server is not None:
            tier = {"type": TIER_CLASS, "module_path": "kv_connector.tier.remote_tier"}
            extra["secondary_tiers"] = [tier | self.tier_settings() | {"sees_everything": True}]
        return extra


def client_config(config: RemoteConfig, client_name: str) -> ClientConfig:
    """Configuration of this engine's client, of the first server if there are several. Raises
    `ConfigError` without a server."""
    if config.server is None:
        raise ConfigError("set 'server', the cache server's tcp://host:port")
    _, endpoint, keys = read_list(config.server).members[0]
    return ClientConfig(
        endpoint=endpoint,
        keys=keys,
        client_name=client_name,
        get_window_bytes=parse_bytes(config.window, "window"),
        transport=config.transport,
        integrity=config.integrity,
    )


def client_configs(config: RemoteConfig, client_name: str) -> dict[str, ClientConfig]:
    """The same for each server of the list, by its name. Raises `ConfigError` without a server."""
    first = client_config(config, client_name)
    servers = read_list(config.server or ())
    if len(servers.members) == 1:
        return {servers.members[0].name: first}
    return {
        name: replace(
            first, endpoint=endpoint, keys=keys, server_name=name, fleet_digest=servers.digest
        )
        for name, endpoint, keys in servers.members
    }


def client_for(
    config: RemoteConfig,
    client_name: str,
    factory: Callable[[ClientConfig], CacheClient] | None = None,
) -> CacheClient:
    """This engine's client, of one server or of several, or the one that `factory` makes. Raises
    `ConfigError` without a server."""
    given = client_config(config, client_name)
    if factory is not None:
        return factory(given)
    assert config.server is not None
    if is_one_server(config.server):
        return RemoteClient(given)
    return Fleet(WatchedList(config.server), given)


def is_one_server(server: str | Sequence[str]) -> bool:
    """Whether a setting names one server, and for ever: a file may get another line."""
    return not (isinstance(server, str) and server.startswith(FILE)) and (
        len(read_list(server).members) == 1
    )


def read_config(kind: type[Config], given: Mapping[str, Any], where: str) -> Config:
    """Check `given` against `kind`. Raises `ConfigError` with the setting and its value, and for
    an unknown name with the nearest known one."""
    known = kind.__struct_fields__
    for name in given:
        if name in REPLACED:
            raise ConfigError(
                f"{where}: {name!r} was replaced: 'patience' is the share of the time to compute a "
                "prompt that it may wait for the server, and 'max_wait_ms' the upper limit"
            )
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown setting {name!r}{hint}")
    try:
        return msgspec.convert(dict(given), kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_name_the_value(error, given)}") from error
    except UnicodeEncodeError as error:  # JSON may have half of a surrogate pair, and msgspec not
        raise ConfigError(f"{where}: {error.object!r:.80} is no text: {error.reason}") from error


def settings_of(vllm_config: "VllmConfig") -> ConnectorConfig:
    assert vllm_config.kv_transfer_config is not None
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    return read_config(ConnectorConfig, given, "kv_connector_extra_config")


def with_extra_config(vllm_config: "VllmConfig", extra: dict[str, Any]) -> "VllmConfig":
    """A copy of `vllm_config` with other connector settings. The original is shared: under some
    executors a second connector is built from it in the same process."""
    translated = copy.copy(vllm_config)
    translated.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert translated.kv_transfer_config is not None
    translated.kv_transfer_config.kv_connector_extra_config = extra
    return translated


def _name_the_value(error: msgspec.ValidationError, given: Mapping[str, Any]) -> str:
    message = str(error)
    name = message.rpartition("$.")[2].rstrip("`")
    return f"{name}={given[name]!r}: {message}" if name in given else message
