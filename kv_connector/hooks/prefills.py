"""The prompts that an engine computes, by the plans of its steps: chunks with their positions, and
what stands before a prompt that begins now."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kv_connector.tier.speeds import Chunk

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class Prefills:
    """Belongs to the scheduler thread."""

    _lengths: dict[str, int] = field(default_factory=dict)
    """Tokens of each prompt that was begun and is not computed to its end."""
    _computed: dict[str, int] = field(default_factory=dict)
    """Tokens of it that are computed once the steps planned so far have ended."""

    def chunks_of(self, plan: "SchedulerOutput") -> tuple[list[Chunk], int]:
        """The chunks of prompts in this step, and its number of other tokens."""
        self._forget(plan.finished_req_ids)
        counts = plan.num_scheduled_tokens
        chunks: list[Chunk] = []
        for new in plan.scheduled_new_reqs:
            self._lengths[new.req_id] = new.prompt_len
            chunks.append(self._goes_on(new.req_id, new.num_computed_tokens, counts))
        cached = plan.scheduled_cached_reqs
        if len(counts) - len(chunks) < plan.total_num_scheduled_tokens - _tokens(chunks):
            for name, position in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if counts.get(name, 0) > 1:
                    chunks.append(self._goes_on(name, position, counts))
        return chunks, plan.total_num_scheduled_tokens - _tokens(chunks)

    def unfinished(self) -> list[Chunk]:
        """What is left of the prompts that were begun."""
        return [
            Chunk(length - self._computed[name], self._computed[name])
            for name, length in self._lengths.items()
        ]

    def _goes_on(self, name: str, position: int, counts: dict[str, int]) -> Chunk:
        chunk = Chunk(counts.get(name, 0), position)
        self._computed[name] = position + chunk.tokens
        if self._computed[name] >= self._lengths.get(name, 0):
            self._forget([name])
        return chunk

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._lengths.pop(name, None)
            self._computed.pop(name, None)


def _tokens(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.tokens for chunk in chunks)
