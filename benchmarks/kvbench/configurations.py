"""Configurations of an engine and its requests, read from TOML."""

from pathlib import Path
from typing import Literal

import msgspec

from remote_server.traces.models import Positive, convert, tables_of

BUILT_IN = Path(__file__).with_name("configurations.toml")

Dtype = Literal["fp8", "int8", "fp16", "bf16", "fp32"]


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a transfer but the model."""

    tp: Positive = 1
    """Ranks that share each layer."""

    pp: Positive = 1
    """Stages that share the layers."""

    kv_dtype: Dtype = "fp8"
    """Type of the KV cache, which determines its size."""

    model_dtype: Dtype = "fp8"
    """Type of the weights, used only in a plan that is `compatible` with the source."""

    page_size: Positive = 16
    """Tokens of one block."""

    pattern: Literal["block", "layer"] = "block"
    """`block`: all layers of a stage move as one. `layer`: each layer moves by itself."""

    prompt_tokens: Positive = 1000
    requests: Positive = 1


def load_configurations(path: Path = BUILT_IN) -> dict[str, Configuration]:
    """Configurations by name, from a file like `configurations.toml`. Raises `ConfigError`."""
    return {
        name: convert(table, Configuration, f"{path}: [{name}]")
        for name, table in tables_of(path).items()
    }
