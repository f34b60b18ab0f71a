"""Our connector over vLLM's own scheduler half, with KV cache groups of a test's choice: no model
and no server, but everything between a request and the tier is real."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_configs import build
from scripted_client import STEP_END, ScriptedClient
from vllm.config import KVTransferConfig, VllmConfig
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

from kv_connector.connector import KVFerryConnector
from kv_connector.identity.worker_reports import WorkerReport
from kv_connector.tier import remote_tier
from remote_server.protocol import KeyState

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

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


Layers = Mapping[str, KVCacheSpec]
"""One KV cache group: its layers, which have one spec."""


def group_of(number: int, spec: KVCacheSpec, num_layers: int = 1) -> Layers:
    return {f"layers.{number}.{layer}": spec for layer in range(num_layers)}


def configs_of(
    model: Path,
    folder: Path,
    patch: pytest.MonkeyPatch,
    groups: Sequence[Layers],
    *,
    layout: str = "LBHNC",
    num_blocks: int = 16,
    match_unit: int | None = None,
    **settings: Any,
) -> tuple[VllmConfig, KVCacheConfig]:
    """An engine's configs with these KV cache groups, laid out by vLLM. `match_unit` is its
    `prefix_match_unit`."""
    config = build(model, folder, patch).config
    config.parallel_config.distributed_executor_backend = "uni"
    config.cache_config.prefix_match_unit = match_unit
    config.cache_config.kv_cache_layout = layout
    config.cache_config.num_gpu_blocks_override = num_blocks
    given = {"cpu_pool": "1MiB", "server": "tcp://127.0.0.1:1", **settings}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="KVFerryConnector",
        kv_connector_module_path="kv_connector.connector",
        kv_role="kv_both",
        kv_connector_extra_config=given,
    )
    specs = [KVCacheGroupSpec(list(group), next(iter(group.values()))) for group in groups]
    cache = get_kv_cache_config_from_groups(config, specs, 1 << 30)
    cache.kv_cache_layout = layout
    return config, cache


@contextmanager
def real_connector(
    model: Path,
    folder: Path,
    patch: pytest.MonkeyPatch,
    groups: Sequence[Layers] = (group_of(0, FULL),),
    **more: Any,
) -> Iterator[KVFerryConnector]:
    """The scheduler's half, of which the tier's client is a `ScriptedClient`. No worker has made
    a pool and left its mark in it. `more` is as for `configs_of`."""
    config, cache = configs_of(model, folder, patch, groups, **more)
    init = remote_tier.RemoteTier.__init__
    patch.setattr(
        remote_tier.RemoteTier,
        "__init__",
        lambda self, *args, **given: init(self, *args, **given, client_factory=ScriptedClient),
    )
    patch.setattr("kv_connector.spec.check_pool_is_there", lambda *_: None)
    patch.setattr("kv_connector.spec.FerrySpec._take_marks", lambda *_: None)
    connector = KVFerryConnector(config, KVConnectorRole.SCHEDULER, cache)
    connector._resets.weights.on_report(WorkerReport(0, facts={}))  # they are not watched
    try:
        yield connector
    finally:
        connector.shutdown()


HYBRID = (group_of(0, FULL), group_of(1, RECURRENT))
"""Groups for which vLLM reads the most of a request's parameters, and stores the part of a block at
the end of a prompt."""


@pytest.fixture
def hybrid(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KVFerryConnector]:
    folder = tmp_path / "one"
    with real_connector(model, folder, monkeypatch, HYBRID, match_unit=BLOCK // 2) as made:
        assert made.scheduler.config.supports_partial_tail
        yield made


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


def matched(
    connector: KVFerryConnector, request: Request, states_of: Callable[[Any], list[KeyState]]
) -> int:
    """The tokens that a new request finds in the end. Its lookups are answered by `states_of`, and
    its loads land."""
    connector.on_new_request(request)
    for _ in range(6):
        tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        if tokens is not None:
            return tokens
        connector.scheduler.manager.on_schedule_end(STEP_END)
        for asked in ScriptedClient.latest.open:
            if asked.operation == "lookup":
                asked.found(*states_of(asked))
        ScriptedClient.latest.reply_to_all()
    raise AssertionError("it still waits")


def empty_step(handed_over: dict[str, list[tuple[int, int, int]]] | None = None) -> Any:
    """A step that computes nothing, in which vLLM hands these boundary states to the connector."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = KVConnectorBlockState(
        req_ids=set(), resolve_block_ids=lambda _: (), boundary_state_offloads=handed_over or {}
    )
    return output
