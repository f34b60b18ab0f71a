"""Shapes of models, which determine the bytes of KV cache of a token, read from TOML."""

import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from remote_server.errors import ConfigError

BUILT_IN = Path(__file__).with_name("models.toml")

BYTES_PER_NUMBER = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "fp32": 4}

Positive = Annotated[int, msgspec.Meta(gt=0)]

T = TypeVar("T")


class GroupedQueries(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gqa",
                     tag_field="attention"):  # fmt: skip
    """A key and a value for each KV head of each layer."""

    layers: Positive
    kv_heads: Positive
    head_dim: Positive

    @property
    def numbers_per_layer(self) -> int:
        """Numbers of one token."""
        return 2 * self.kv_heads * self.head_dim

    def shards(self, tp: int) -> int:
        """The number of different parts of a layer on `tp` ranks: at most the number of heads.

        Raises `ConfigError` when the heads cannot be divided.
        """
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ConfigError(f"tp: {tp} ranks cannot share {self.kv_heads} KV heads evenly")
        return min(tp, self.kv_heads)


class LatentVectors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mla",
                    tag_field="attention"):  # fmt: skip
    """One compressed vector and one rotary part for all heads of a layer."""

    layers: Positive
    latent_dim: Positive
    rope_dim: Positive

    @property
    def numbers_per_layer(self) -> int:
        """Numbers of one token."""
        return self.latent_dim + self.rope_dim

    def shards(self, tp: int) -> int:
        """One part for any number of ranks, because every rank holds all of it."""
        return 1


Shape = GroupedQueries | LatentVectors


class Model(msgspec.Struct, frozen=True):
    """A shape and its name."""

    name: str
    shape: Shape

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of the whole cache: all layers, all ranks, each part once."""
        return self.shape.layers * self.shape.numbers_per_layer * BYTES_PER_NUMBER[dtype]

    def bytes_per_layer(self, dtype: str, tp: int) -> Fraction:
        """Bytes of one token of one layer on one rank."""
        numbers = Fraction(self.shape.numbers_per_layer, self.shape.shards(tp))
        return numbers * BYTES_PER_NUMBER[dtype]


def load_models(path: Path = BUILT_IN) -> dict[str, Model]:
    """The models of a file in the form of `models.toml`, by name. Raises `ConfigError`."""
    return {
        name: Model(name, convert(table, Shape, f"{path}: [{name}]"))
        for name, table in tables_of(path).items()
    }


def choose(names: str, known: Mapping[str, T], what: str) -> list[T]:
    """Those of `known` named by comma-separated parts of their names, as in `70b,r1`.

    Raises `ConfigError`, with the known names, when a part matches none or several.
    """
    return [_find(part.strip(), known, what) for part in names.split(",")]


def _find(part: str, known: Mapping[str, T], what: str) -> T:
    if part in known:
        return known[part]
    found = [name for name in known if part and part.lower() in name.lower()]
    if len(found) != 1:
        problem = f"names several: {', '.join(found)}" if found else "names none"
        raise ConfigError(f"{what}: {part!r} {problem}; there are {', '.join(known)}")
    return known[found[0]]


def tables_of(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises `ConfigError`."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def convert(table: object, kind: Any, where: str) -> Any:
    """`table` as a `kind`. Raises `ConfigError` naming `where`, the field and the value."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None


def bytes_of_model(name: str, dtype: str) -> int:
    """Bytes of a token's KV cache: of a known model, by its name as a hub has it or by a part of
    it, or of the model whose config.json, or whose folder, is at `name`. Raises `ConfigError`."""
    path = Path(name)
    if path.exists():
        path = path / "config.json" if path.is_dir() else path
        return Model(name, _shape_in(path)).bytes_per_token(dtype)
    known = load_models()
    typed = name.lower().rpartition("/")[2].removeprefix("meta-")
    for one in known:
        if typed.startswith(one) and _SUFFIXES.fullmatch(typed[len(one) :]):
            return known[one].bytes_per_token(dtype)
    try:
        return _find(typed, known, "--model").bytes_per_token(dtype)
    except ConfigError as error:
        raise ConfigError(f"{error}; or name a config.json, or --kv-bytes-per-token") from None


_SUFFIXES = re.compile(
    r"(-(instruct|chat|base|it|hf|thinking|fp8|bf16|awq|gptq|int4|int8|v?\d+(\.\d+)*))*"
)
"""Parts of a hub's name that leave the shape as it is. A distilled model has another."""

_FULL = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers with a key and a value for each token; windows are counted as if they kept
all."""


def _shape_in(path: Path) -> Shape:
    """Of a model's config.json. Raises `ConfigError`."""
    try:
        config = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: no JSON: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    if not isinstance(config, dict) or "num_hidden_layers" not in config:
        raise ConfigError(f"{path}: no num_hidden_layers: not the config.json of a language model")
    kinds = config.get("layer_types") or config.get("layers_block_type") or []
    if {*kinds} - _FULL or "hybrid_override_pattern" in config:
        raise ConfigError(
            f"{path}: it has layers without a key and a value for each token; give "
            "--kv-bytes-per-token: an engine logs the bytes of its blocks"
        )
    table: dict[str, object] = {"layers": config["num_hidden_layers"]}
    if config.get("kv_lora_rank"):
        rope = config.get("qk_rope_head_dim")
        table |= {"attention": "mla", "latent_dim": config["kv_lora_rank"], "rope_dim": rope}
    else:
        heads = config.get("num_attention_heads")
        size = config.get("head_dim")
        if size is None and isinstance(heads, int) and heads > 0:
            hidden = config.get("hidden_size")
            size = hidden // heads if isinstance(hidden, int) else None
        kv_heads = config.get("num_key_value_heads") or heads
        table |= {"attention": "gqa", "kv_heads": kv_heads, "head_dim": size}
    shape: Shape = convert(table, Shape, f"{path}")
    return shape
