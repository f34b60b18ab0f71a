"""Shapes of models, which determine the bytes of KV cache of a token, read from TOML."""

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
