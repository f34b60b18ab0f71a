"""Qwen-Bailian's format: a cloud's requests to Qwen models, as their authors published them.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, 6326]}

One JSON object a line. `timestamp` is in seconds from the start, the lengths are in tokens.
`chat_id`, `parent_chat_id` (-1: none), `type` and `turn` are not needed: `hash_ids` has an id for
each 16 tokens of the prompt. Its authors hash a block's tokens, so that an id may follow different
blocks. An engine's block has a prefix: here a block is its id and all ids before it.
"""

from pathlib import Path

from remote_server.traces.collector import BlockSizes, Collector, id_lines
from remote_server.traces.text import Lines
from remote_server.traces.trace import Request, Trace

NAME = "Qwen-Bailian"

TOKENS_PER_BLOCK = 16

MOVED = "ids that follow other blocks than before, taken as different blocks"


_BEYOND = 1 << 70
"""Larger than any id of a trace."""


def read(path: Path, lines: Lines, partial_blocks: bool, limit: int | None) -> Trace:
    """The first `limit` requests; see `reader.read`."""
    made = Collector(path, NAME, is_tree=True)
    sizes = BlockSizes((TOKENS_PER_BLOCK,))
    blocks = _Blocks()
    for number, one in id_lines(made, sizes, lines):
        prompt, has_moved = blocks.of(one.hash_ids)
        if has_moved:
            made.problem(number, MOVED)
        made.add(number, Request(one.timestamp, one.input_length, one.output_length, prompt))
        if len(made) == limit:
            break
    return made.trace(TOKENS_PER_BLOCK, partial_blocks=partial_blocks)


class _Blocks:
    """A number for each id and all ids before it: the id itself where only one block precedes it in
    the whole trace, which is the rule."""

    def __init__(self) -> None:
        self._parent_of: dict[int, int | None] = {}
        self._moved: dict[tuple[int | None, int], int] = {}

    def of(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The numbers of a prompt's blocks, and whether one of its ids is the first behind these
        blocks and was behind others before."""
        parent, before, found = None, len(self._moved), []
        for each in ids:
            number = each
            if self._parent_of.setdefault(each, parent) != parent:
                number = self._moved.setdefault((parent, each), _BEYOND + len(self._moved))
            found.append(number)
            parent = number
        return tuple(found), len(self._moved) > before
