"""Conversations made up with a seed: each turn continues the prompt of the one before, after a
pause. All begin with the same block."""

import random

from remote_server.traces import Request
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

CONVERSATIONS = 3_000
EVERY_S = 0.6
FIRST_BLOCKS, TURN_BLOCKS = 14, 6
GOES_ON = 0.5
PAUSE_S = 150.0
ANSWER_TOKENS = 200


def conversations(seed: int = 1, begin: int = 0) -> tuple[Request, ...]:
    """All turns in the order of their arrival. Blocks are numbered from `begin` on."""
    chance = random.Random(seed)
    now, new = 0.0, begin + 1
    made: list[Request] = []
    for _ in range(CONVERSATIONS):
        now += chance.expovariate(1 / EVERY_S)
        at, blocks = now, [begin]
        added = FIRST_BLOCKS
        while True:
            count = 1 + int(chance.expovariate(1 / added))
            blocks = [*blocks, *range(new, new + count)]
            new += count
            tokens = len(blocks) * TOKENS_PER_BLOCK
            made.append(Request(at, tokens, ANSWER_TOKENS, tuple(blocks)))
            if chance.random() >= GOES_ON:
                break
            at += chance.expovariate(1 / PAUSE_S)
            added = TURN_BLOCKS
    return tuple(sorted(made, key=lambda request: request.arrival_s))
