"""Requests for which CPU pool and server do nothing: their KV may be that of other weights.

vLLM's own limits of a request do the work: with both at zero nothing of it is looked up below the
engine, and nothing of it is stored. They are decided anew whenever the engine begins the request,
for the first time or after a preemption.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum, auto
from typing import TYPE_CHECKING

from kv_connector.adapters import Adapters, AdapterState
from kv_connector.old_kv import OldKV

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class Reason(StrEnum):
    """Why a request is kept back. Counted by it."""

    OLD_KV = auto()  # it holds KV of before a reset
    LORA_CHANGED = auto()  # the files of its adapter were replaced
    LORA_UNKNOWN = auto()  # the files of its adapter cannot be seen


_ADAPTERS = {
    AdapterState.SAME: None,
    AdapterState.CHANGED: Reason.LORA_CHANGED,
    AdapterState.UNKNOWN: Reason.LORA_UNKNOWN,
}

Limits = tuple[int | None, int | None]


class KeptBack:
    """Which requests are kept back, and vLLM's limits of each as they were before.

    `count` is called once for each request and reason. The scheduler thread alone uses this.
    """

    def __init__(
        self, scheduler: "OffloadingConnectorScheduler", count: Callable[[Reason], None]
    ) -> None:
        self._scheduler = scheduler
        self._count = count
        self._old = OldKV()
        self._adapters = Adapters()
        self._limits: dict[str, Limits] = {}

    def begin_epoch(self, pool: "BlockPool | None") -> tuple[int, int]:
        """The connector was reset. Gives how many requests and blocks of the engine are old."""
        requests = [status.req for status in self._scheduler._req_status.values()]
        old = self._old.begin_epoch(requests, pool)
        for request_id in old:
            self.keep(request_id, Reason.OLD_KV)
        return len(old), len(self._old)

    def begin(self, request: "Request", engine_tokens: int) -> None:
        """The engine begins this request, with so many tokens of its own cache."""
        if self._limits:
            self._release(request.request_id)
        if self._old:
            self._old.looked_up(request.request_id, engine_tokens)
        if request.lora_request is not None:
            reason = _ADAPTERS[self._adapters.look_at(request.lora_request)]
            if reason is not None:
                self.keep(request.request_id, reason)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks") -> None:
        """The request was given these blocks: all that it holds."""
        if not self._old:
            return
        groups = self._scheduler.config.kv_group_configs
        ids = blocks.get_block_ids()
        is_old = self._old.allocated(
            request.request_id,
            [ids[group.group_idx] for group in groups],
            [group.tokens_per_block for group in groups],
        )
        if is_old:
            self.keep(request.request_id, Reason.OLD_KV)

    def scheduled(self, output: "SchedulerOutput") -> None:
        """A step was scheduled, and nothing of it was stored yet."""
        if self._old:
            for request_id in self._old.scheduled(output):
                self.keep(request_id, Reason.OLD_KV)
        state = output.kv_connector_block_state
        if self._limits and state is not None:
            # vLLM stores these, parts of blocks of hybrid models, whatever the limit.
            for request_id in self._limits.keys() & state.boundary_state_offloads.keys():
                del state.boundary_state_offloads[request_id]

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, and their last blocks were stored or not."""
        for request_id in request_ids:
            self._old.finished(request_id)
            self._limits.pop(request_id, None)

    def keep(self, request_id: str, reason: Reason) -> None:
        """Keep the request back from now on, until the engine begins it anew."""
        status = self._scheduler._req_status.get(request_id)
        if status is not None and request_id not in self._limits:
            self._limits[request_id] = (status.max_load_tokens, status.max_offload_tokens)
            shut_out(status)
            self._count(reason)

    def _release(self, request_id: str) -> None:
        limits = self._limits.pop(request_id, None)
        status = self._scheduler._req_status.get(request_id)
        if limits is not None and status is not None:
            status.max_load_tokens, status.max_offload_tokens = limits


def shut_out(status: "RequestOffloadState") -> None:
    """Nothing of the request is loaded or stored below the engine."""
    status.max_load_tokens = status.max_offload_tokens = 0
