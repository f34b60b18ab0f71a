"""The settings in force, fit to be shown."""

from typing import Any

import msgspec

from remote_server.server.config import ServerConfig

MASK = "***"
_SECRET = ("token", "secret", "password", "key")
"""What ends the name of a setting that is a secret itself. Where one lies is none."""


def shown(config: ServerConfig) -> dict[str, Any]:
    """Every setting by its name; `MASK` in place of a secret that is set."""
    return {
        name: MASK if value and name.endswith(_SECRET) else value
        for name, value in msgspec.structs.asdict(config).items()
    }
