"""How an engine is set up, and what is asked of it, read from TOML."""

from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.kvbench.models import Positive, convert, tables_of

BUILT_IN = Path(__file__).with_name("configurations.toml")

Dtype = Literal["fp8", "int8", "fp16", "bf16", "fp32"]


class Configuration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything about a transfer but the model."""

    tp: Positive = 1
    """Ranks that share each layer."""

    pp: Positive = 1
    """Stages that share the layers."""

    kv_dtype: Dtype = "fp8"
    """Of the KV cache. This decides how large it is."""

    model_dtype: Dtype = "fp8"
    """Of the weights. Decides nothing, except of a plan that is `compatible` with the source."""

    page_size: Positive = 16
    """Tokens of one block."""

    pattern: Literal["block", "layer"] = "block"
    """`block`: all layers of a stage move as one. `layer`: each layer moves by itself."""

    prompt_tokens: Positive = 1000
    requests: Positive = 1


def load_configurations(path: Path = BUILT_IN) -> dict[str, Configuration]:
    """Those of a file in the form of `configurations.toml`, by name. Raises `ConfigError`."""
    return {
        name: convert(table, Configuration, f"{path}: [{name}]")
        for name, table in tables_of(path).items()
    }
