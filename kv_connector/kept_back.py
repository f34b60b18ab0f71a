"""Requests kept from pool and server, because their KV may be of other weights than its name.

Requests with KV from before a reset are one kind, requests with a changed LoRA adapter another.
vLLM's keys identify an adapter by name and path. An adapter replaced under both keeps the keys of
the old one, and vLLM's own cache then serves the old KV. The pool must not: it is larger and lives
longer. Each lookup compares the adapter's files with those of its first use. A changed adapter
stays out of the pool for good: the scheduler cannot see whether the engine loaded the new files
before or after it computed a block.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.config_facts import NotKnown
from kv_connector.model_facts import model_folder

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
        RequestOffloadState,
    )
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


logger = init_logger("vllm.kvferry.kept_back")

Ids = Sequence[int]

# Prefixes of the files that vLLM reads. Other files, such as the state of a training run, may
# change.
_READ_BY_VLLM = ("adapter_", "new_embeddings")

# About 5 MB. Further adapters do not use the pool.
MOST_ADAPTERS = 16_384


class AdapterState(StrEnum):
    """Whether the pool may be used for an adapter."""

    SAME = auto()
    CHANGED = auto()
    UNKNOWN = auto()  # the scheduler cannot read its files


class Adapters:
    """Adapters by name and path, as in vLLM's keys. Only the scheduler thread uses it."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], bytes] = {}
        """Identity at the first use; empty once the files changed or could not be read."""

    def check(self, adapter: "LoRARequest") -> AdapterState:
        """Compare the adapter's files with those of its first use. Opens none; raises nothing."""
        key = (adapter.lora_name, adapter.lora_path)
        before = self._files.get(key)
        if before == b"":
            return AdapterState.CHANGED
        try:
            now = _identity(adapter.lora_path)
        except (OSError, NotKnown) as error:
            return self._not_known(key, str(error))
        if before is None:
            if len(self._files) >= MOST_ADAPTERS:
                return AdapterState.UNKNOWN
            self._files[key] = before = now
        if before == now:
            return AdapterState.SAME
        self._files[key] = b""
        logger.warning(
            "the files of LoRA adapter %s in %s have changed: its requests do not use the CPU "
            "pool until the engine is restarted; load it under another name or path",
            *key,
        )
        return AdapterState.CHANGED

    def _not_known(self, key: tuple[str, str], why: str) -> AdapterState:
        """The pool may hold blocks of this adapter, so any files found later count as changed."""
        if len(self._files) < MOST_ADAPTERS or key in self._files:
            self._files[key] = b""
            logger.warning(
                "the scheduler cannot read the files of LoRA adapter %s in %s, so its requests do "
                "not use the CPU pool: %s",
                *key,
                why,
            )
        return AdapterState.UNKNOWN


def _identity(path: str) -> bytes:
    """A digest of the names, inodes, sizes and times of the adapter's files.

    It includes the inode change time, which no program can set. Raises `OSError` or `NotKnown`.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = model_folder(path, None, None)
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_READ_BY_VLLM):
                stat = entry.stat()
                one = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                found.append((entry.name, *one))
    if not found:
        raise NotKnown(f"no file of an adapter in {folder}")
    return hashlib.blake2b(repr(sorted(found)).encode(), digest_size=16).digest()


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


class Reason(StrEnum):
    """Why a request is kept back; the label of the metric."""

    OLD_KV = auto()  # it holds KV from before a reset
    LORA_CHANGED = auto()  # the files of its adapter were replaced
    LORA_UNKNOWN = auto()  # the files of its adapter cannot be read


_ADAPTERS = {
    AdapterState.SAME: None,
    AdapterState.CHANGED: Reason.LORA_CHANGED,
    AdapterState.UNKNOWN: Reason.LORA_UNKNOWN,
}

Limits = tuple[int | None, int | None]


class KeptBack:
    """The requests that are kept back, and the vLLM limits to restore for each.

    `count` is called once for each request and reason. Only the scheduler thread uses this class.
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
        """The connector was reset. Returns the numbers of old requests and old engine blocks."""
        requests = [status.req for status in self._scheduler._req_status.values()]
        old = self._old.begin_epoch(requests, pool)
        for request_id in old:
            self.keep(request_id, Reason.OLD_KV)
        return len(old), len(self._old)

    def begin(self, request: "Request", engine_tokens: int) -> None:
        """The engine begins this request, with `engine_tokens` from its own cache."""
        if self._limits:
            self._release(request.request_id)
        if self._old:
            self._old.looked_up(request.request_id, engine_tokens)
        if request.lora_request is not None:
            reason = _ADAPTERS[self._adapters.check(request.lora_request)]
            if reason is not None:
                self.keep(request.request_id, reason)

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
            self.keep(request.request_id, Reason.OLD_KV)

    def scheduled(self, output: "SchedulerOutput") -> None:
        """A step was scheduled; its blocks are not stored yet."""
        if self._old:
            for request_id in self._old.scheduled(output):
                self.keep(request_id, Reason.OLD_KV)
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

    def keep(self, request_id: str, reason: Reason) -> None:
        """Keep the request back until the engine begins it again."""
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
