"""Sessions of agents, made up with a seed: long system prompts that many share, and many turns.

Few system prompts are much more frequent than the others (Zipf). Each turn of a session sends the
whole session so far, as the requests of an agent do, and adds the result of a tool and an answer.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

SECONDS = 3600.0
"""The duration in which sessions begin."""

_SYSTEM_TOKENS = 2048, 24576
_TURNS = 2, 16
_TURN_TOKENS = 300, 3000
_ANSWER_TOKENS = 200
_PAUSE_S = 5.0, 60.0


class Sizes(NamedTuple):
    """The number of system prompts, and of sessions over them."""

    prompts: int = 40
    sessions: int = 4000


def sessions(sizes: Sizes, seed: int = 1) -> tuple[Request, ...]:
    """All requests of all sessions, in the order of their arrival, with full blocks only."""
    chance = random.Random(seed)
    ids = itertools.count()
    systems = [chance.randint(*_SYSTEM_TOKENS) for _ in range(sizes.prompts)]
    of_system = [[next(ids) for _ in range(tokens // TOKENS_PER_BLOCK)] for tokens in systems]
    weights = [1 / rank for rank in range(1, sizes.prompts + 1)]
    made: list[Request] = []
    for _ in range(sizes.sessions):
        (which,) = chance.choices(range(sizes.prompts), weights)
        made += _session(chance, systems[which], of_system[which], ids)
    return tuple(sorted(made, key=lambda request: request.arrival_s))


def _session(
    chance: random.Random, tokens: int, shared: list[int], ids: Iterator[int]
) -> Iterator[Request]:
    """The requests of one session. The block in which its system prompt ends is its own."""
    now, blocks = chance.uniform(0, SECONDS), list(shared)
    for _ in range(chance.randint(*_TURNS)):
        tokens += chance.randint(*_TURN_TOKENS)
        while len(blocks) < tokens // TOKENS_PER_BLOCK:
            blocks.append(next(ids))
        yield Request(now, tokens, _ANSWER_TOKENS, tuple(blocks))
        tokens += _ANSWER_TOKENS
        now += chance.uniform(*_PAUSE_S)
