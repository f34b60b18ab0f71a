"""KV of before a reset that is still in the engine: whose requests keep away from pool and server.

A reset of the connector empties the CPU pool and begins a new weight epoch. It does not always
empty the engine: vLLM answers `false` while requests run, keeps their blocks and its whole prefix
cache, and resets the connector all the same. Such a request computes its next blocks behind KV of
the old weights, and a later request that hits those blocks does the same. Neither may store a
block under the new name.

So the blocks that held KV at the reset are remembered, and those that are filled behind them. A
request that holds one of them is *old* until it ends or is preempted. A block is forgotten when
another request gets it to fill anew. Nothing is remembered after a reset that emptied the engine.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Ids = Sequence[int]


class OldKV:
    """Old requests by name, old blocks by id. The scheduler thread alone uses it."""

    def __init__(self) -> None:
        self._requests: set[str] = set()
        self._blocks: set[int] = set()
        self._hits: dict[str, int] = {}
        """Tokens that a request found in the engine's cache, from its lookup until it ends."""

    def __len__(self) -> int:
        """How many blocks of the engine hold KV of before the last reset. While there is none,
        no other method needs to be called."""
        return len(self._blocks)

    def begin_epoch(self, requests: Iterable["Request"], pool: "BlockPool | None") -> list[str]:
        """The connector was reset. Gives the requests that are old from now on.

        Without `pool`, no block is known, and only requests that run now are old.
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
        """The engine begins the request anew, with so many tokens of its own cache. It holds no
        block before that."""
        self._requests.discard(request_id)
        self._hits[request_id] = engine_tokens

    def allocated(self, request_id: str, blocks: Sequence[Ids], tokens_a_block: Ids) -> bool:
        """The request was given all these blocks, by KV cache group. Gives whether it is old.

        Its first blocks are those that it hit, as far as `looked_up` counted tokens. The others
        are filled for it.
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
        """A step was scheduled. Gives the requests that have become old in it."""
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
        """Blocks that begin as a copy of an old one in this step: the part of a hybrid model's
        block that two prompts share."""
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
