"""Our connector over vLLM's own scheduler half, with KV cache groups of a test's choice: no model
and no server, but everything between a request and the tier is real."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_configs import build
from scripted_client import ScriptedClient
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from kv_connector import remote_tier
from kv_connector.connector import KVFerryConnector

BLOCK = 32

FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)

# A state smaller than the attention's page, which vLLM pads to the page.
RECURRENT = MambaSpec(
    block_size=BLOCK,
    shapes=((16, 8),),
    dtypes=(torch.float32,),
    page_size_padded=FULL.page_size_bytes,
    mamba_cache_mode="align",
)


@contextmanager
def real_connector(
    model: Path,
    folder: Path,
    patch: pytest.MonkeyPatch,
    groups: Sequence[KVCacheSpec] = (FULL,),
    match_unit: int | None = None,
    **settings: Any,
) -> Iterator[KVFerryConnector]:
    """The scheduler's half, of which the tier's client is a `ScriptedClient`. The groups have a
    layer each. `match_unit` is vLLM's `prefix_match_unit`."""
    config = build(model, folder, patch).config
    config.cache_config.prefix_match_unit = match_unit
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_connector_module_path="kv_connector.connector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_pool": "1MiB", "server": "tcp://127.0.0.1:1", **settings
        },
    )  # fmt: skip
    cache = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(groups)],
    )
    cache.kv_cache_layout = "LBNHC"
    init = remote_tier.RemoteTier.__init__
    patch.setattr(
        remote_tier.RemoteTier,
        "__init__",
        lambda self, *args, **kwargs: init(self, *args, **kwargs, client_factory=ScriptedClient),
    )
    connector = KVFerryConnector(config, KVConnectorRole.SCHEDULER, cache)
    try:
        yield connector
    finally:
        connector.shutdown()


def request_of(
    connector: KVFerryConnector, name: str, num_tokens: int, params: Any = None, **more: Any
) -> Request:
    """A request as vLLM makes it from a client's body with these `kv_transfer_params`."""
    hash_function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_function)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": params}),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(
            connector.scheduler.config.tokens_per_hash, hash_function
        ),
        **more,
    )


def empty_step(handed_over: dict[str, list[tuple[int, int, int]]] | None = None) -> Any:
    """A step that computes nothing, in which vLLM hands these boundary states to the connector."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(), resolve_block_ids=lambda _: (), boundary_state_offloads=handed_over or {}
    )
    return output
