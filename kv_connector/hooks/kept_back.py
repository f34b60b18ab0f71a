"""Requests that are kept from pool and server.

A request is kept back because its KV may be of other weights than its name: it has KV from before a
reset, or the files of its LoRA adapter have changed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kv_connector.identity.adapters import Adapters, AdapterState

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Ids = Sequence[int]


class OldKV:
    """Requests and engine blocks with KV from before a reset. Only the scheduler thread uses it."""

    def __init__(self) -> None:
        self._requests: set[str] = set()
        self._blocks: set[int] = set()
        self._hits: dict[str, int] = {}
        """Tokens found in the engine's cache, by request, from its lookup until it ends."""

    def __len__(self) -> int:
        """Number of engine blocks with KV from before the last reset. At 0 no other method needs
        to be called."""
        return len(self._blocks)

    def begin_epoch(self, requests: Iterable["Request"], pool: "BlockPool | None") -> list[str]:
        """The connector was reset. Returns the requests that are old from now on.

        Without `pool` no blocks are known, and only running requests are old.
        """
        running = {r.request_id for r in requests if r.num_computed_tokens and not r.is_finished()}
        blocks = pool.blocks if pool is not None else ()
        self._requests, self._hits = running, {}
        self._blocks = {
            block.block_id
            for block in blocks
            if not block.is_null and (block.ref_cnt or block.block_hash is not None)
        }
        return sorted(running)

    def looked_up(self, request_id: str, engine_tokens: int) -> None:
        """The engine begins the request again, with `engine_tokens` from its own cache. Until then
        the request holds no block."""
        self._requests.discard(request_id)
        self._hits[request_id] = engine_tokens

    def allocated(self, request_id: str, blocks: Sequence[Ids], tokens_a_block: Ids) -> bool:
        """The request holds exactly these blocks, by KV cache group. Returns whether it is old.

        Its first blocks are cache hits, as many as `looked_up` counted tokens. The request fills
        the others.
        """
        hit, new = set[int](), set[int]()
        for ids, tokens in zip(blocks, tokens_a_block, strict=True):
            num_hit = -(-self._hits.get(request_id, 0) // tokens)
            hit.update(ids[:num_hit])
            new.update(ids[num_hit:])
        if not self._blocks.isdisjoint(hit):
            self._requests.add(request_id)
        self._fills(request_id, new)
        return request_id in self._requests

    def scheduled(self, output: "SchedulerOutput") -> list[str]:
        """A step was scheduled. Returns the requests that became old in it."""
        cached = output.scheduled_cached_reqs
        for request_id, groups in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id not in cached.resumed_req_ids:  # `allocated` knows its blocks
                for ids in groups or ():
                    self._fills(request_id, ids)
        copied = self._copied(output)
        if not copied:
            return []
        state = output.kv_connector_block_state
        tables = {name: state and state.get_block_ids(name) for name in output.num_scheduled_tokens}
        found = [
            name
            for name, groups in tables.items()
            if any(not copied.isdisjoint(ids) for ids in groups or ())
        ]
        self._requests.update(found)
        return found

    def _copied(self, output: "SchedulerOutput") -> set[int]:
        """Blocks that begin as a copy of an old block in this step: in hybrid models, the part of
        a block that two prompts share."""
        copies = output.kv_cache_block_copies or ()
        copied = {copy.dst_block_id for copy in copies if copy.src_block_id in self._blocks}
        self._blocks |= copied
        return copied

    def _fills(self, request_id: str, ids: Iterable[int]) -> None:
        if request_id in self._requests:
            self._blocks.update(block for block in ids if block)  # 0 is vLLM's null block
        else:
            self._blocks.difference_update(ids)

    def finished(self, request_id: str) -> None:
        self._requests.discard(request_id)
        self._hits.pop(request_id, None)


# A request's reasons besides the state of its adapter: it holds KV from before a reset; a worker
# reports no samples of its weights any more.
OLD_KV = "old_kv"

WEIGHTS_UNKNOWN = "weights_unknown"

Limits = tuple[int | None, int | None]


class KeptBack:
    """The requests that are kept back, and the vLLM limits to restore for each.

    `count` is called once for each request and reason. Only the scheduler thread uses this class.
    """

    def __init__(
        self, scheduler: "OffloadingConnectorScheduler", count: Callable[[str], None]
    ) -> None:
        self._scheduler = scheduler
        self._count = count
        self._old = OldKV()
        self._adapters = Adapters()
        self._limits: dict[str, Limits] = {}

    def begin_epoch(self, pool: "BlockPool | None") -> tuple[int, int]:
        """The connector was reset. Returns the numbers of old requests and old engine blocks."""
        requests = [status.req for status in self._scheduler._req_status.values()]
        old = self._old.begin_epoch(requests, pool)
        for request_id in old:
            self.keep(request_id, OLD_KV)
        return len(old), len(self._old)

    def begin(self, request: "Request", engine_tokens: int) -> None:
        """The engine begins this request, with `engine_tokens` from its own cache."""
        if self._limits:
            self._release(request.request_id)
        if self._old:
            self._old.looked_up(request.request_id, engine_tokens)
        if request.lora_request is not None:
            adapter = self._adapters.check(request.lora_request)
            if adapter is not AdapterState.SAME:
                self.keep(request.request_id, adapter)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks") -> None:
        """The request holds exactly these blocks."""
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
            self.keep(request.request_id, OLD_KV)

    def scheduled(self, output: "SchedulerOutput") -> None:
        """A step was scheduled; its blocks are not stored yet."""
        if self._old:
            for request_id in self._old.scheduled(output):
                self.keep(request_id, OLD_KV)
        state = output.kv_connector_block_state
        if self._limits and state is not None:
            # vLLM stores these parts of blocks, of hybrid models, regardless of the limit.
            for request_id in self._limits.keys() & state.boundary_state_offloads.keys():
                del state.boundary_state_offloads[request_id]

    def finished(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, and their last stores were submitted or dropped."""
        for request_id in request_ids:
            self._old.finished(request_id)
            self._limits.pop(request_id, None)

    def keep(self, request_id: str, reason: str) -> None:
        """Keep the request back until the engine begins it again. `reason` is a metric's label."""
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
    """Load and store nothing of the request below the engine."""
    status.max_load_tokens = status.max_offload_tokens = 0


def drop_unwanted_tails(
    scheduler: "OffloadingConnectorScheduler", output: "SchedulerOutput"
) -> None:
    """Apply a request's store limit to its partial tail too: vLLM 0.32 reads a limit of 0 there as
    no limit, and ends its process by an assertion on a small limit."""
    state = output.kv_connector_block_state
    if state is None or not state.boundary_state_offloads:
        return
    for request_id, handed_over in state.boundary_state_offloads.items():
        status = scheduler._req_status.get(request_id)
        limit = None if status is None else status.max_offload_tokens
        if limit is not None:
            handed_over[:] = [entry for entry in handed_over if entry[2] <= limit]
