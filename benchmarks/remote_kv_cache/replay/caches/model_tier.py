"""A tier whose server, or fleet, is a model: it answers in the same step and moves no bytes."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from benchmarks.simulated.tiered_pool import MakeTier
from kv_connector.pool.rows import PoolRows
from kv_connector.vllm.features import CacheHitSource


class Model(Protocol):
    """A `ServerModel` or a `FleetModel`."""

    def holds(self, key: bytes, /) -> bool: ...

    def get(self, keys: Sequence[bytes], /) -> Sequence[Any]: ...

    def put(self, keys: Sequence[bytes], /) -> object: ...


class ModelTier(SecondaryTierManager):  # type: ignore[misc]  # Any: vLLM is not followed
    """The decisions of `RemoteTier` without delays and losses."""

    cache_hit_source = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, spec: Any, view: memoryview, model: Model) -> None:
        super().__init__(spec, view, "ModelTier")
        self._rows = PoolRows(view, spec)
        self._model = model
        self._ended: deque[JobResult] = deque()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        end_token = req_context.get_offload_key_position(key)
        fits = end_token is None or end_token <= self._rows.last_token_of_a_prompt
        return LookupResult.HIT if fits and self._model.holds(key) else LookupResult.MISS

    def submit_load(self, job_metadata: TransferJob) -> None:
        landed = self._model.get(list(job_metadata.keys))
        good = len(landed) == len(job_metadata.keys)
        self._ended.append(JobResult(job_metadata.job_id, good, landed))

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._model.put(list(job_metadata.keys))
        self._ended.append(JobResult(job_metadata.job_id, True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while self._ended:
            yield self._ended.popleft()

    def drain_jobs(self) -> None:
        pass

    def shutdown(self) -> None:
        self._rows.release()


def model_tier(model: Model) -> MakeTier:
    """A tier of this model, for a `TieredPool`."""
    return lambda spec, view: ModelTier(spec, view, model)
