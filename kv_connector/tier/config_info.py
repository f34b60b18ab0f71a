"""The labels that the remote tier adds to vLLM's own metric `vllm:kv_offload_config_info`.

vLLM 0.33 and newer ask for it, once, at the end of the first step that has counted anything. All
workers have reported by then, so the namespace has its name.
"""

from kv_connector.config import RemoteConfig
from remote_server.fleet.server_list import FILE, read_list

_SETTINGS = (
    *("transport", "patience", "max_wait_ms", "put_timeout_ms", "window"),
    *("integrity", "break_even", "kv_events"),
)
LABELS = tuple(f"kvferry_{name}" for name in ("server", "namespace", "block_bytes", *_SETTINGS))

_MOST_NAMED = 4
"""Servers of a list that the label names."""


def config_info(
    config: RemoteConfig, namespace: str | None, block_bytes: int
) -> dict[str, str | int | float | bool]:
    """A value for each of `LABELS`. `namespace` has the digest of the engine's facts; None, an
    empty label, where the workers have not reported or the server is not used. Key files are left
    out."""
    settings = [getattr(config, name) for name in _SETTINGS]
    given = (_servers(config), namespace or "", block_bytes, *settings)
    return dict(zip(LABELS, given, strict=True))


def _servers(config: RemoteConfig) -> str:
    if config.server is None:
        return ""
    if isinstance(config.server, str) and config.server.startswith(FILE):
        return config.server.partition("?")[0]
    members = [member.endpoint for member in read_list(config.server).members]
    more = len(members) - _MOST_NAMED
    return ",".join(members[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
