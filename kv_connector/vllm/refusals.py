"""Refusals at an engine's start, by vLLM's configuration: executors, models and settings with which
kvferry would be wrong or useless."""

import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from kv_connector.config import RemoteConfig
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import read_list

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_CURE = "use --distributed-executor-backend mp with all workers on one host"


def refuse_without_shared_pool(parallel: "ParallelConfig") -> None:
    """Raise `ConfigError` for an executor whose workers are known not to share the scheduler's
    pool. For an unknown executor the marks in the pool decide."""
    backend = parallel.distributed_executor_backend
    if parallel.use_ray:
        raise ConfigError(
            "--distributed-executor-backend ray: Ray starts the workers, and the engine core "
            f"shares no pool with them; {_CURE}"
        )
    if _is_external_launcher(backend) and parallel.world_size > 1:
        raise ConfigError(
            f"--distributed-executor-backend external_launcher with {parallel.world_size} ranks: "
            f"each rank has a scheduler of its own, which shares no pool with the others; {_CURE}"
        )
    if parallel.nnodes_within_dp > 1:
        raise ConfigError(
            f"--nnodes {parallel.nnodes}: an engine on {parallel.nnodes_within_dp} hosts has no "
            f"memory that all of its workers share; {_CURE}"
        )


def refuse_whole_prompts(vllm_config: "VllmConfig") -> None:
    """Raise `ConfigError` for a model that needs every token of a prompt computed. vLLM turns its
    own prefix caching off for it, and would nevertheless load a prefix through a connector.

    Two are known: poolers that average all tokens, which then end the engine, and vLLM's reference
    backend for MLA on a CPU, whose prefill does not see the prefix: its answers would be wrong.
    """
    model = vllm_config.model_config
    if model is None:
        return
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        raise ConfigError(
            "this model pools all tokens of a prompt, so none may be loaded: vLLM has no prefix "
            "caching for it either; use no connector"
        )
    caches = vllm_config.cache_config.enable_prefix_caching
    in_chunks = vllm_config.scheduler_config.enable_chunked_prefill
    if current_platform.is_cpu() and model.use_mla and not (in_chunks or caches):
        raise ConfigError(
            "MLA on a CPU without AMX: vLLM computes a prompt without the prefix that is loaded, "
            "and its answers would be wrong; use a CPU with AMX, a GPU, or no connector"
        )


def _is_external_launcher(backend: object) -> bool:
    if inspect.isclass(backend):
        from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

        return issubclass(backend, ExecutorWithExternalLauncher)
    return backend == "external_launcher"


def refuse_incomplete_rows(blocks_per_row: int, kv_cache_config: "KVCacheConfig") -> None:
    """Raise `ConfigError` for rows of several blocks in a group that keeps only the end of a
    prefix. vLLM 0.32 stores a row when its last block exists; the others may be missing in such a
    group, and a request that needs them would load the row's previous content."""
    if blocks_per_row == 1:
        return
    for group in kv_cache_config.kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, FullAttentionSpec):
                raise ConfigError(
                    f"blocks_per_row={blocks_per_row}: this model has a group of "
                    f"{type(spec).__name__}, which keeps only the end of a prefix, so rows of "
                    "several blocks would be incomplete; remove the setting"
                )


def refuse_unpublished_events(config: RemoteConfig, *, published: bool) -> None:
    """Raise `ConfigError` for `kv_events` in an engine that publishes no events."""
    if config.kv_events and not published:
        raise ConfigError(
            "kv_events: this engine publishes no events; add --kv-events-config "
            '\'{"enable_kv_cache_events": true, "publisher": "zmq"}\', or remove the setting'
        )


def refuse_weak_hashes(algorithm: str, server: str | Sequence[str] | None) -> None:
    """Raise `ConfigError` for a hash algorithm that a shared server cannot use.

    Keys must be equal in every process, and unforgeable on a server with tenants. xxhash is not
    cryptographic: only the random seed of each process keeps a client from making a prompt whose
    blocks have the keys of another prompt.
    """
    if server is None or not algorithm.startswith("xxhash"):
        return
    if any(member.keys for member in read_list(server).members):
        raise ConfigError(
            f"--prefix-caching-hash-algo={algorithm} with a server that has keys: a prompt can be "
            "made whose blocks have the keys of another prompt; use sha256"
        )
    if "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"--prefix-caching-hash-algo={algorithm} makes different keys in every process, so no "
            "engine would ever hit; use sha256 or set PYTHONHASHSEED to one value everywhere"
        )
