"""A conversation of seven turns: the lookups, reads and writes of its growing prompt.

The first prompt fills one block of 128 tokens; each later turn adds an answer of 50 tokens and a
question of 10. A turn looks up all blocks written before, reads all of them in one stream, and
writes the blocks that have become full since: 7 lookups, 6 reads and 3 writes. The source books
that as (6 + 3) x 128 = 1,152 tokens, a block for each operation; in fact 10 blocks are read.
"""

import hashlib
from typing import NamedTuple

from remote_server.protocol import Stretch

BLOCK_TOKENS = 128
NUM_TURNS = 7

FIRST_PROMPT_TOKENS = 128
ANSWER_TOKENS = 50
QUESTION_TOKENS = 10


class Turn(NamedTuple):
    """One turn, in numbers of blocks from the first of the conversation."""

    known: int
    """Blocks written before: looked up, and read when there are any."""

    full: int
    """Blocks full by now: those from `known` to this are written."""


def turns() -> list[Turn]:
    known, found = 0, []
    for number in range(NUM_TURNS):
        tokens = FIRST_PROMPT_TOKENS + number * (ANSWER_TOKENS + QUESTION_TOKENS)
        found.append(Turn(known, tokens // BLOCK_TOKENS))
        known = found[-1].full
    return found


TURNS = turns()
BLOCKS = TURNS[-1].full

LOOKUPS = len(TURNS)
READS = sum(turn.known > 0 for turn in TURNS)
WRITES = sum(turn.full > turn.known for turn in TURNS)
TOKENS_BOOKED = (READS + WRITES) * BLOCK_TOKENS
BLOCKS_MOVED = BLOCKS + sum(turn.known for turn in TURNS)


def chain_of(first: int, end: int) -> list[Stretch]:
    """The places of these blocks in their conversation, as an engine sends them."""
    return [Stretch(end - first, 0, first * BLOCK_TOKENS, BLOCK_TOKENS)]


def keys_of(speaker: bytes, number: int) -> list[bytes]:
    """The keys of a speaker's `number`th conversation: each hashes all blocks before it.

    They are as long as vLLM's: a hash of 32 bytes and a cache group of 4.
    """
    keys = []
    parent = hashlib.sha256(b"%s %d" % (speaker, number)).digest()
    for place in range(BLOCKS):
        parent = hashlib.sha256(parent + place.to_bytes(4, "little")).digest()
        keys.append(parent + bytes(4))
    return keys
