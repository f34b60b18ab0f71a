"""Mooncake's format: the traces of its authors, and those that other programs wrote like them.

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}

One JSON object a line. `timestamp` is in ms from the start, the lengths are in tokens, and there is
an id for each 512 tokens of the prompt; the last block may be partial. Equal ids mean equal prompts
from the first token to the end of that block, so the blocks of a trace form a tree, and a prompt is
a path in it. Conversation, tool-agent and synthetic trace of the repository have it. Other programs
write it with other block sizes, which only the counts of ids show.
"""

from pathlib import Path

from remote_server.traces.collector import BlockSizes, Collector, id_lines
from remote_server.traces.text import Lines
from remote_server.traces.trace import Request, Trace

NAME = "Mooncake"

TOKENS_PER_BLOCK = 512

OTHER_SIZES = (16, 32, 64, 128, 256, 1024, 2048)


def read(path: Path, lines: Lines, partial_blocks: bool, limit: int | None) -> Trace:
    """The first `limit` requests; see `reader.read`."""
    made = Collector(path, NAME)
    sizes = BlockSizes((TOKENS_PER_BLOCK, *OTHER_SIZES))
    for number, one in id_lines(made, sizes, lines):
        made.add(
            number,
            Request(one.timestamp / 1000, one.input_length, one.output_length, one.hash_ids),
        )
        if len(made) == limit:
            break
    if sizes.best != TOKENS_PER_BLOCK:
        made.assumptions.append(
            f"blocks of {sizes.best} tokens, as the counts of hash_ids show; Mooncake's have 512"
        )
    return made.trace(sizes.best, partial_blocks=partial_blocks)
