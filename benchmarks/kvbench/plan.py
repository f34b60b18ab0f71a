"""The arithmetic of a plan: the bytes of a token, a block and a whole transfer."""

import math
from fractions import Fraction

import msgspec

from benchmarks.kvbench.configurations import Configuration
from remote_server.errors import ConfigError
from remote_server.traces.models import LatentVectors, Model


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The transfer of `requests` prompts: `batch` blocks of `block_bytes`."""

    model: str
    configuration: Configuration
    bytes_per_token: int
    """Bytes of a token in the whole cache: all layers, all ranks, each part once."""

    block_bytes: int
    """Bytes of a page on one rank of one stage, or of one layer of it."""

    batch: int
    """Blocks of all ranks and stages, of all requests."""

    note: str = ""
    """A note against misreading; empty without one."""

    @property
    def num_bytes(self) -> int:
        return self.batch * self.block_bytes

    @property
    def title(self) -> str:
        return f"{self.model} r={self.configuration.requests}"


def plan(model: Model, configuration: Configuration, *, compatible: bool = False) -> Plan:
    """The plan of `model` under `configuration`.

    The KV cache's dtype determines the sizes, and each request fills its last block alone: ten
    prompts of 1,000 tokens are 630 blocks of 16. With `compatible` the numbers are the source's:
    its tool rounds once for all requests (625), uses the weights' dtype for models without a
    latent, divides the latent between ranks although each holds all of it, and rounds the layers
    of a stage up for a latent and down for others.

    Raises `ConfigError` when the ranks or stages cannot divide the model.
    """
    if configuration.pp > model.shape.layers:
        raise ConfigError(f"pp: {configuration.pp} stages for {model.shape.layers} layers")
    if compatible:
        return _source_plan(model, configuration)
    shape, dtype = model.shape, configuration.kv_dtype
    by_block = configuration.pattern == "block"
    parts = configuration.pp if by_block else shape.layers
    token = model.bytes_per_layer(dtype, configuration.tp) * Fraction(shape.layers, parts)
    pages = math.ceil(configuration.prompt_tokens / configuration.page_size)
    shards = shape.shards(configuration.tp)
    return Plan(
        model=model.name,
        configuration=configuration,
        bytes_per_token=model.bytes_per_token(dtype),
        block_bytes=math.ceil(token * configuration.page_size),
        batch=configuration.requests * pages * shards * parts,
        note=_note(model, configuration, shards),
    )


def _source_plan(model: Model, configuration: Configuration) -> Plan:
    """The steps of the source's tool, with its roundings."""
    latent = isinstance(model.shape, LatentVectors)
    dtype = configuration.kv_dtype if latent else configuration.model_dtype
    layers, per_token = model.shape.layers, model.bytes_per_token(dtype)
    per_layer = per_token // layers / configuration.tp
    if not latent:
        per_layer = int(per_layer)
    if configuration.pattern == "block" and latent:
        per_layer *= math.ceil(layers / configuration.pp)
    elif configuration.pattern == "block":
        per_layer = int(per_layer * (layers / configuration.pp))
    block_bytes = int(per_layer * configuration.page_size)
    if not block_bytes:
        raise ConfigError(f"tp: {configuration.tp} ranks leave no byte of {model.name} to each")
    whole = per_token * configuration.prompt_tokens
    return Plan(
        model=model.name,
        configuration=configuration,
        bytes_per_token=per_token,
        block_bytes=block_bytes,
        batch=math.ceil(whole / block_bytes * configuration.requests),
        note="batch and sizes as the source's tool rounds them",
    )


def _note(model: Model, configuration: Configuration, shards: int) -> str:
    notes = []
    if shards < configuration.tp:
        notes.append(f"{configuration.tp} ranks hold {shards} different part(s); each moves once")
    layers, pp = model.shape.layers, configuration.pp
    if configuration.pattern == "block" and layers % pp:
        notes.append(f"stages hold {layers // pp} or {layers // pp + 1} layers; this is the mean")
    return "; ".join(notes)
