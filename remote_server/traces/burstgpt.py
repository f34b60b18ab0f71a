"""BurstGPT's format: a campus's requests to OpenAI's models, from its second release on.

    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type

CSV. `Timestamp` is in seconds, the lengths are in tokens. A row without response tokens has failed.
Rows of an API have no `Session ID`. The first release has no column `Session ID`: nothing in it
shows which prompts begin alike.

A session becomes one text that grows: each prompt begins with the prompt before and its answer, in
blocks of 16 tokens. That is an assumption. A prompt that is shorter than those begins a new text.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remote_server.traces.collector import NO_PREFIXES, Collector
from remote_server.traces.tables import rows_of, seconds, whole
from remote_server.traces.text import Lines
from remote_server.traces.trace import Request, Trace, TraceError

NAME = "BurstGPT"

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
"""Those of both releases by which the format is known."""

SESSION = "Session ID"

TOKENS_PER_BLOCK = 16

MOST_BLOCKS, MOST_DIFFERENT = 1 << 28, 1 << 25
"""Of all prompts together, and those of them that are different: 2 GB and 1.6 GB."""

ASSUMED = (
    "a session's next prompt begins with its prompt before and the answer, in blocks of "
    f"{TOKENS_PER_BLOCK} tokens"
)
FAILED = "no response tokens, so it failed: left out"
ALONE = "no session, so nothing is known of its prefix: left out"
SHORTER = "a prompt shorter than its session so far: it begins a new text"


@dataclass
class _Text:
    """The text of a session, which grows."""

    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


def read(path: Path, lines: Lines, limit: int | None, columns: Sequence[str]) -> Trace:
    """The first `limit` requests; see `reader.read`."""
    if SESSION not in columns:
        raise TraceError(
            f"{path}: BurstGPT without the column {SESSION!r} has times and lengths only: which "
            f"prompts begin alike is not in it. Take BurstGPT's second release, BurstGPT_3.csv. "
            f"{NO_PREFIXES}"
        )
    made = Collector(path, NAME, is_tree=True)
    made.assumptions.append(ASSUMED)
    texts: dict[str, _Text] = {}
    numbers = itertools.count()
    num_blocks = num_different = 0
    for number, row in rows_of(path, lines):
        try:
            at_s = seconds(row, "Timestamp")
            prompt, answer = whole(row, "Request tokens"), whole(row, "Response tokens")
        except ValueError as error:
            raise made.refuse(number, f"{error}") from None
        if not row[SESSION] or not answer:
            made.problem(number, FAILED if row[SESSION] else ALONE)
            continue
        text = texts.setdefault(row[SESSION], _Text())
        if prompt < text.tokens:
            made.problem(number, SHORTER)
            text = texts[row[SESSION]] = _Text()
        made.check(number, at_s, prompt, answer)
        missing = max(0, prompt // TOKENS_PER_BLOCK - len(text.blocks))
        num_blocks += len(text.blocks) + missing
        num_different += missing
        if num_blocks > MOST_BLOCKS or num_different > MOST_DIFFERENT:
            raise made.refuse(
                number,
                f"the prompts up to here have {num_blocks:,} blocks, {num_different:,} of them "
                f"different: too many to hold in memory; keep the first rows, as with "
                f"`head -n {number - 1}`",
            )
        text.blocks += itertools.islice(numbers, missing)
        text.tokens = prompt + answer
        made.add(number, Request(at_s, prompt, answer, tuple(text.blocks)))
        if len(made) == limit:
            break
    if not len(made):
        raise TraceError(
            f"{path}: no row with a session and response tokens: which prompts begin alike is not "
            f"in it. {NO_PREFIXES}"
        )
    return made.trace(TOKENS_PER_BLOCK)
