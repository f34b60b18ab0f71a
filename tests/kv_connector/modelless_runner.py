"""The worker's half of an engine without a model: block tables, tokens, and what it computes.

What a model would compute for a block is a number that depends on the weights, on the content of
the block before it as the engine holds it, and on the block's tokens. It fills the whole block, so
part of a copy, bytes of another block and a block of old weights are recognized wherever they turn
up.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from kv_connector.connector import KVFerryConnector

TOKENS = 32
"""In a block."""

SAMPLED = 7
"""The token that every step samples."""

Prefix = tuple[int, ...]
"""The tokens up to the end of a block."""

Words = np.ndarray[Any, np.dtype[np.int64]]


def computed(weights: int, before: int, tokens: Sequence[int]) -> int:
    """The contents of a block with these tokens, behind a block with `before` in it."""
    return hash((weights, before, tuple(tokens))) & (2**62 - 1)


def right(weights: int, tokens: Sequence[int]) -> list[int]:
    """The contents of the whole blocks of these tokens when one model has computed all of them."""
    content, before = [], 0
    for first in range(0, len(tokens) // TOKENS * TOKENS, TOKENS):
        before = computed(weights, before, tokens[first : first + TOKENS])
        content.append(before)
    return content


def held(block: Words) -> int | None:
    """The contents of a block or row; None where its words differ."""
    first = int(block[0])
    return first if (block == first).all() else None


class ModellessRunner:
    """Runs steps as vLLM's model runners do, from what a `SchedulerOutput` holds: it sees nothing
    else of the scheduler, so steps may be scheduled ahead."""

    def __init__(
        self, config: VllmConfig, connector: KVFerryConnector, cache: dict[str, torch.Tensor]
    ) -> None:
        """`cache` has one layer, all bytes of a block in a row. Registers it as vLLM does."""
        self._config = config
        (memory,) = cache.values()
        self._content: Words = memory.numpy().view(np.int64)
        with self._as_the_connector(connector):
            self._second = None
            if config.use_v2_model_runner:
                self._second = ActiveKVConnector(config, cache)
            else:
                connector.register_kv_caches(cache)
        self.weights = 1
        """What is computed depends on them."""
        self._connector = connector
        self._tables: dict[str, list[int]] = {}
        self._tokens: dict[str, list[int]] = {}
        self.ever: dict[Prefix, set[int]] = {}
        """All contents that were computed for the last block of these tokens."""

    def computed_elsewhere(self, tokens: Sequence[int], weights: int) -> list[int]:
        """Another engine has computed the whole blocks of these tokens; returns their contents."""
        contents = right(weights, tokens)
        for i, content in enumerate(contents):
            self.ever.setdefault(tuple(tokens[: (i + 1) * TOKENS]), set()).add(content)
        return contents

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step. The connector is called by vLLM's own code for its first and second runner."""
        with self._as_the_connector(self._connector), set_forward_context(None, self._config):
            if self._second is not None:
                batch: Any = SimpleNamespace(
                    idx_mapping=None,
                    req_ids=list(output.num_scheduled_tokens),
                    num_tokens=output.total_num_scheduled_tokens,
                )
                before: Any = self._second.pre_forward
                takes_batch = "input_batch" in inspect.signature(before).parameters  # not vLLM 0.31
                before(output, batch) if takes_batch else before(output)
                sampled = self._forward(output)
                self._second.finish_forward()
                told = self._second.post_forward(output.finished_req_ids)
            else:
                assert output.kv_connector_metadata is not None
                self._connector.handle_preemptions(output.kv_connector_metadata)
                with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as told:
                    sampled = self._forward(output)
        names = list(output.num_scheduled_tokens)
        index = {name: i for i, name in enumerate(names)}
        return ModelRunnerOutput(names, index, sampled, kv_connector_output=told)

    @contextmanager
    def _as_the_connector(self, connector: KVFerryConnector) -> Iterator[None]:
        """vLLM has one connector a process; here scheduler and worker have one each."""
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None

    def _forward(self, output: SchedulerOutput) -> list[list[int]]:
        begins = self._update_requests(output)
        return [
            self._compute(name, begins[name], begins[name] + count)
            for name, count in output.num_scheduled_tokens.items()
        ]

    def _update_requests(self, output: SchedulerOutput) -> dict[str, int]:
        """Returns where each request's computation begins."""
        begins = {}
        for name in output.finished_req_ids:
            self._tables.pop(name, None)
            self._tokens.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids or ())
            begins[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, begin in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._tables[name] = []
                self._tokens[name] = list(cached.all_token_ids[name])
            self._tables[name] += blocks[0] if blocks is not None else []
            begins[name] = begin
        return begins

    def _compute(self, name: str, begin: int, end: int) -> list[int]:
        """Fill the blocks of these tokens; one more token once all have been computed."""
        blocks, tokens = self._tables[name], self._tokens[name]
        assert end <= len(tokens), f"{name}: {end} tokens of {len(tokens)} known ones"
        for i in range(begin // TOKENS):
            found, prefix = held(self._content[blocks[i]]), tuple(tokens[: (i + 1) * TOKENS])
            known = self.ever.get(prefix, ())
            assert found in known, f"{name} runs on a block {i} with other bytes than its own"
        for i in range(begin // TOKENS, -(-end // TOKENS)):
            before = int(self._content[blocks[i - 1], 0]) if i else 0
            part = tokens[i * TOKENS : min(end, (i + 1) * TOKENS)]
            content = computed(self.weights, before, part)
            self._content[blocks[i]] = content
            if len(part) == TOKENS:
                self.ever.setdefault(tuple(tokens[: (i + 1) * TOKENS]), set()).add(content)
        if end < len(tokens):
            return []
        tokens.append(SAMPLED)
        return [SAMPLED]
