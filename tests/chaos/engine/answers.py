"""The right answers to prompts, computed without a cache, and the verdict on other answers.

An engine rounds one prompt's numbers differently in different batches. Two tokens that are about
equally probable then change places. Such an answer is right, and all that follows the changed
token is another answer. Each of its tokens is therefore compared with what the engine computes
without any cache for the same beginning.
"""

from collections.abc import Sequence
from typing import Protocol

from examples.engine import Completion

# Nothing is looked up and nothing kept: the prompt is computed, as without a connector.
OPT_OUT = {"kv_transfer_params": {"kvferry": {"load": False, "store": False}}}

# In addition nothing is taken from the engine's own cache, where blocks from the server may be.
UNCACHED = {**OPT_OUT, "cache_salt": "computed by itself"}

TIE = 0.1
"""Nats. A logit is a bfloat16: neighbours are 1/64 apart between 2 and 4, and 1/32 between 4 and 8.
Ten answers that differed were at most 1/64 behind; a token that is wrong is mostly behind by 1."""


class Asked(Protocol):
    """An engine, as far as it is needed here."""

    def ask(self, prompt: list[int], max_tokens: int = 8, **extra: object) -> Completion: ...


class Answers:
    """What each prompt is answered, by one engine."""

    def __init__(self, engine: Asked) -> None:
        self._engine = engine
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def learn(self, prompt: list[int], max_tokens: int) -> None:
        """Compute the answer. The engine keeps the prompt's blocks in its own cache."""
        answer = self._engine.ask(prompt, max_tokens, logprobs=None, **OPT_OUT)
        self._expected[tuple(prompt)] = answer.token_ids

    def length(self, prompt: list[int]) -> int:
        """Of the answer, in tokens."""
        return len(self._expected[tuple(prompt)])

    def check(self, prompt: list[int], token_ids: Sequence[int]) -> None:
        """AssertionError unless this is a right answer to a prompt that was learned."""
        expected = self._expected[tuple(prompt)]
        assert len(token_ids) == len(expected), f"{len(token_ids)} tokens of {len(expected)}"
        same = next(
            (at for at, token in enumerate(expected) if token != token_ids[at]), len(expected)
        )
        for at in range(same, len(expected)):
            lost = self._behind_the_best([*prompt, *token_ids[:at]], token_ids[at])
            assert lost <= TIE, (
                f"not what was computed: token {at} of {list(token_ids)}, for {expected}, is "
                f"{lost:.3f} nats behind the most probable one"
            )

    def _behind_the_best(self, prompt: list[int], token: int) -> float:
        """How much less probable the token is than the most probable next one, in nats. Infinite
        when others leave it out of the first five."""
        (logprobs,) = self._engine.ask(prompt, 1, logprobs=5, **UNCACHED).logprobs
        return max(logprobs.values()) - logprobs.get(f"token_id:{token}", float("-inf"))
