"""The connector class that vLLM loads: vLLM's offloading, with our settings and our spec.

Everything that schedules, fences and counts references is `OffloadingConnector`'s. This class
translates the settings, names the namespace, looks after the pool file's name and the metric
definitions, and lets single requests opt out.
"""

import copy
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kv_connector.vllm_support import refuse_unsupported

refuse_unsupported()  # before every import that another version of vLLM may not serve

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey

import kv_connector
from kv_connector import namespace
from kv_connector.canary import Outcome, Report, fly
from kv_connector.config import (
    ConnectorConfig,
    client_config,
    read_config,
    refuse_random_hashes,
)
from kv_connector.guard import never_raises
from kv_connector.kept_back import KeptBack, Reason, shut_out
from kv_connector.pool_file import engine_core_pid, pool_name, sweep_dead_pools
from kv_connector.remote_tier import RemoteTier
from kv_connector.request_options import apply_request_options, keep_to_pool
from kv_connector.reset_flush import ResetFlush
from kv_connector.spec import POOL_NAME_KEY, FerrySpec
from kv_connector.traffic import Traffic
from remote_server.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        PromMetric,
        PromMetricT,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.kvferry")


@dataclass
class WorkerFacts(KVConnectorHandshakeMetadata):
    """What each worker tells the scheduler before the first request."""

    facts: namespace.Facts | None
    """None when the worker could not tell."""

    canary: Report | None = None
    """None where there is no server."""

    failed_hooks: tuple[str, ...] = ()
    """Hooks of the worker that failed and were kept from the engine."""


class KVFerryConnector(OffloadingConnector):
    """Prefix-cache blocks to the CPU pool and on to the remote server, and back.

    Settings are the keys of `kv_connector_extra_config`; see `ConnectorConfig`. Raises
    `ConfigError` at start for a setting that is unknown or cannot work here, and never raises
    afterwards.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        assert vllm_config.kv_transfer_config is not None
        self._config = _read(vllm_config)
        in_worker = role == KVConnectorRole.WORKER
        extra = self._config.for_vllm()
        extra[POOL_NAME_KEY] = _pool_name(vllm_config, in_worker=in_worker)
        if not in_worker:
            _greet()
            if self._config.server is not None:
                refuse_random_hashes(vllm_config.cache_config.prefix_caching_hash_algo)
            for path in sweep_dead_pools():
                logger.info("removed %s, left by an engine that died", path)
        translated = _with_extra_config(vllm_config, extra)
        super().__init__(translated, role, kv_cache_config)
        self._worker_facts: namespace.Facts | None = None
        self._canary: Report | None = None
        self._failed_hooks: list[str] = []
        self._facts: namespace.Facts = {}
        self._not_known: list[str] = []
        self._traffic = Traffic()
        self._remote: RemoteTier | None = None
        self._flush = ResetFlush()
        if not in_worker:
            self._find_parts()
            self._take_facts(kv_cache_config)
            self._kept_back = KeptBack(self.scheduler, self._count_kept_back)

    def _take_facts(self, kv_cache_config: "KVCacheConfig") -> None:
        if self._remote is not None:
            taken = namespace.engine_facts(self._vllm_config, kv_cache_config)
            self._facts, self._not_known = taken

    def _find_parts(self) -> None:
        manager: Any = self.scheduler.manager
        tiers = [tier for tier in manager.secondary_tiers if isinstance(tier, RemoteTier)]
        self._remote = tiers[0] if tiers else None

    # ── start: worker → scheduler ────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._worker_facts = self._look_around(kv_caches)
        self._canary = self._fly_canary()

    @never_raises(lambda: None)
    def _look_around(self, kv_caches: dict[str, torch.Tensor]) -> namespace.Facts | None:
        return namespace.worker_facts(self._vllm_config, kv_caches)

    @never_raises(lambda: Report(Outcome.BROKEN, "see the worker's log"))
    def _fly_canary(self) -> Report | None:
        if self._config.server is None:
            return None
        config = client_config(self._config, f"canary of {self._vllm_config.instance_id}")
        return fly(self.connector_worker.spec.canary_stage, config)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return WorkerFacts(self._worker_facts, self._canary, tuple(self._failed_hooks))

    @never_raises(lambda: None, but=ConfigError)
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have mapped the pool and said what they run on; nothing was served yet.

        Until this has gone well the remote tier answers every lookup with a miss. Raises
        `ConfigError` for a row that no server takes.
        """
        FerrySpec.forget_pool_name_of(self.scheduler.manager)
        if self._remote is None:
            return
        facts = dict(self._facts)
        reasons = list(self._not_known)
        for rank, told in sorted(metadata.items()):
            assert isinstance(told, WorkerFacts)
            self._count_worker(told)
            if told.facts is None:
                reasons.append(f"worker {rank} could not say what it runs on")
            if told.canary is not None and told.canary.outcome is Outcome.FAILED:
                reasons.append(f"the start-up canary of worker {rank} failed: {told.canary.detail}")
            for name, value in (told.facts or {}).items():
                known = facts.setdefault(name, value)
                if value not in known.split(" + "):
                    facts[name] = f"{known} + {value}"
            logger.debug("worker %s: %s", rank, told)
        if reasons:
            self._remote.stay_out("; ".join(reasons))
            return
        facts["user"] = self._config.namespace
        label = namespace.label_of(self._vllm_config, self._config.namespace)
        self._remote.declare(label, facts)

    def _count_worker(self, told: WorkerFacts) -> None:
        assert self._remote is not None
        for hook in told.failed_hooks:
            self._remote.count_hook_error(hook)
        if told.canary is not None:
            self._remote.count_canary(told.canary.outcome)
            if told.canary.outcome is Outcome.BROKEN:
                self._remote.count_hook_error("canary")

    # ── requests ─────────────────────────────────────────────────────────────────────────

    def on_new_request(self, request: "Request") -> None:
        if not self._apply_options(request):
            keep_to_pool(request)  # it may be one that must not use the server
        super().on_new_request(request)

    @never_raises(lambda: False)
    def _apply_options(self, request: "Request") -> bool:
        apply_request_options(request)
        return True

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # While nothing has come, the answer is known without a walk over a long prompt's keys.
        if self._still_waits(request):
            return None, False
        if not self._begin(request, num_computed_tokens):
            self._shut_out(request)
        tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens is None:
            self._deferred(request, num_computed_tokens)
        else:
            self._admitted(request, num_computed_tokens, num_computed_tokens + tokens)
        return tokens, is_async

    @never_raises(lambda: False)
    def _still_waits(self, request: "Request") -> bool:
        return self._remote is not None and self._remote.still_waits(request.request_id)

    @never_raises(lambda: False)
    def _begin(self, request: "Request", num_computed_tokens: int) -> bool:
        self._kept_back.begin(request, num_computed_tokens)
        return True

    @never_raises(lambda: None)
    def _shut_out(self, request: "Request") -> None:
        shut_out(self.scheduler._req_status[request.request_id])

    def _count_kept_back(self, reason: Reason) -> None:
        if self._remote is not None:
            self._remote.count_kept_back(reason)

    @never_raises(lambda: None)
    def _deferred(self, request: "Request", num_computed_tokens: int) -> None:
        if self._remote is not None:
            keys = self._prefix_keys(request.request_id, num_computed_tokens, request.num_tokens)
            self._remote.deferred(request.request_id, keys)

    @never_raises(lambda: None)
    def _admitted(self, request: "Request", engine_tokens: int, reused_tokens: int) -> None:
        self._traffic.looked_up(request.request_id, request.num_tokens, engine_tokens)
        if self._remote is not None:
            keys = self._prefix_keys(request.request_id, 0, reused_tokens)
            self._remote.admitted(request.request_id, keys)

    def _prefix_keys(self, request_id: str, first_token: int, end_token: int) -> list[OffloadKey]:
        """The keys of the whole rows between these tokens, in prefix order, of the groups that
        hold all of a prefix. Sliding-window groups hold its end alone."""
        status = self.scheduler._req_status[request_id]
        keys: list[OffloadKey] = []
        for config, state in zip(
            self.scheduler.config.kv_group_configs, status.group_states, strict=True
        ):
            if config.sliding_window_size_in_chunks is None:
                first = first_token // config.tokens_per_chunk
                keys += state.offload_keys[first : end_token // config.tokens_per_chunk]
        return keys

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._allocated(request, blocks)
        if num_external_tokens:
            self._count_admission(request, num_external_tokens)

    @never_raises(lambda: None)
    def _allocated(self, request: "Request", blocks: "KVCacheBlocks") -> None:
        self._kept_back.allocated(request, blocks)

    @never_raises(lambda: None)
    def _count_admission(self, request: "Request", num_external_tokens: int) -> None:
        sources = self.scheduler.get_external_cache_hit_sources(request, num_external_tokens)
        self._traffic.admitted({source.value: tokens for source, tokens in sources.items()})

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Any:
        self._scheduled(scheduler_output)
        meta = super().build_connector_meta(scheduler_output)
        self._finished(scheduler_output)
        self._maybe_log()
        self._step_began(scheduler_output)
        return meta

    @never_raises(lambda: None)
    def _scheduled(self, scheduler_output: "SchedulerOutput") -> None:
        self._kept_back.scheduled(scheduler_output)

    @never_raises(lambda: None)
    def _finished(self, scheduler_output: "SchedulerOutput") -> None:
        self._kept_back.finished(scheduler_output.finished_req_ids or ())

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        super().update_connector_output(connector_output)
        self._learn_from_workers(connector_output)
        self._step_ended()

    @never_raises(lambda: None)
    def _learn_from_workers(self, connector_output: "KVConnectorOutput") -> None:
        told = connector_output.kv_connector_worker_meta
        flushed = isinstance(told, OffloadingWorkerMetadata) and self._flush.completed(
            told.completed_jobs
        )
        if flushed and self._remote is not None:
            self._remote.on_reset_flushed()

    # ── resets ───────────────────────────────────────────────────────────────────────────

    def reset_cache(self) -> bool | None:
        """Empty the pool and begin a new weight epoch. vLLM calls this also when requests run,
        whose KV the engine then keeps, and while copies are under way: see `old_kv` and
        `reset_flush`."""
        undelivered = self._before_reset()
        answer = super().reset_cache()
        self._after_reset(undelivered)
        return answer

    @never_raises(set)
    def _before_reset(self) -> set[int]:
        """Gives the jobs whose end an earlier reset has ordered, in no step yet. vLLM asserts
        that there are none, and an operator who is answered `false` resets again at once."""
        self._flush.begin(self.scheduler)
        undelivered = self.scheduler._current_batch_jobs_to_flush
        self.scheduler._current_batch_jobs_to_flush = set()
        return undelivered

    @never_raises(lambda: None)
    def _after_reset(self, undelivered: set[int]) -> None:
        self.scheduler._current_batch_jobs_to_flush |= undelivered
        if self._flush and self._remote is not None:
            self._remote.hold_loads()
        manager = getattr(self, "_kv_cache_manager", None)
        requests, blocks = self._kept_back.begin_epoch(manager and manager.block_pool)
        if blocks or requests:
            logger.warning(
                "the cache was reset while the engine still holds %d blocks of KV: %d requests "
                "that run on it, and those that reuse it, keep away from pool and server",
                blocks,
                requests,
            )

    @never_raises(lambda: None)
    def _step_began(self, scheduler_output: "SchedulerOutput") -> None:
        if self._remote is not None:
            self._remote.break_even.engine.step_began(
                scheduler_output.num_scheduled_tokens.values(), time.monotonic()
            )

    @never_raises(lambda: None)
    def _step_ended(self) -> None:
        if self._remote is not None:
            self._remote.break_even.engine.step_ended(time.monotonic())

    @never_raises(lambda: None)
    def _maybe_log(self) -> None:
        line = self._traffic.line(self._remote.totals() if self._remote is not None else None)
        if line is not None:
            logger.info(line)

    def count_hook_error(self, hook: str) -> None:
        """In a worker it is told with the handshake: only the scheduler has metrics."""
        if self._remote is not None:
            self._remote.count_hook_error(hook)
        elif hook not in self._failed_hooks:
            self._failed_hooks.append(hook)

    # ── before the engine is built ───────────────────────────────────────────────────────

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False, as upstream. Where CUDA graphs are used, vLLM asks this before it loads the
        model: the first chance to refuse a wrong setting."""
        read_config(ConnectorConfig, extra_config, "kv_connector_extra_config")
        return super().requires_piecewise_for_cudagraph(extra_config)

    # ── metrics ──────────────────────────────────────────────────────────────────────────

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics":
        """Declare the metrics of the spec and tier that the engine will really build.

        The API server only has the operator's settings; upstream would read them as its own
        and the first metric that it does not know would fail every request there.
        """
        translated = _with_extra_config(vllm_config, _read(vllm_config).for_vllm())
        return super().build_prom_metrics(
            translated, metric_types, labelnames, per_engine_labelvalues
        )


def _read(vllm_config: "VllmConfig") -> ConnectorConfig:
    assert vllm_config.kv_transfer_config is not None
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    return read_config(ConnectorConfig, given, "kv_connector_extra_config")


def _with_extra_config(vllm_config: "VllmConfig", extra: dict[str, Any]) -> "VllmConfig":
    """A copy of `vllm_config` with other connector settings; the original is shared, and under
    some executors a second connector is built from it in the same process."""
    translated = copy.copy(vllm_config)
    translated.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    assert translated.kv_transfer_config is not None
    translated.kv_transfer_config.kv_connector_extra_config = extra
    return translated


def _pool_name(vllm_config: "VllmConfig", *, in_worker: bool) -> str:
    assert vllm_config.kv_transfer_config is not None
    pid = engine_core_pid(
        in_worker=in_worker,
        executor_backend=vllm_config.parallel_config.distributed_executor_backend,
    )
    return pool_name(pid, str(vllm_config.kv_transfer_config.engine_id))


def _greet() -> None:
    tested = ", ".join(kv_connector.TESTED_VLLM)
    line = ".".join(vllm.__version__.split(".")[:2])
    if line in kv_connector.TESTED_VLLM:
        logger.info("kvferry %s on vLLM %s", kv_connector.__version__, vllm.__version__)
    else:
        logger.warning(
            "kvferry %s is tested with vLLM %s, this is %s",
            kv_connector.__version__,
            tested,
            vllm.__version__,
        )
