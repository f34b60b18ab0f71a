"""Recorded requests: Mooncake's JSON lines, BurstGPT's CSV, ShareGPT's conversations.

Each becomes the same `Request`s as a synthetic user's. Users of a closed loop take them in the
recorded order, each when it is free; an open loop sends them at their times or at a rate.
"""

import csv
import itertools
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.storage_workload.traffic.entries import Entry, Kind, TraceEntry
from benchmarks.storage_workload.traffic.personas import QOS_BY_NAME
from benchmarks.storage_workload.traffic.requests import Request
from remote_server.errors import ConfigError
from remote_server.traces import TraceError
from remote_server.traces.mooncake import TOKENS_PER_BLOCK
from remote_server.traces.tables import seconds

MOONCAKE_BLOCK_TOKENS = TOKENS_PER_BLOCK

BURST_USERS = 1000
BURST_INTERVAL_S = 0.010
"""Seconds between two rows of a BurstGPT file without times."""

MAX_SHAREGPT_TOKENS = (16_384, 2_048)
"""The most tokens of a question and of an answer."""

SHAREGPT_INTERVAL_S = 0.1
CHARACTERS_PER_TOKEN = 4
"""Approximate, for English: ShareGPT has text and no token counts. A text has one token for each
whole group of this many characters, at least one and at most `MAX_SHAREGPT_TOKENS`."""

_ASKS = ("human", "user")
_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant")
"""ShareGPT's names of the two sides. Other roles are ignored."""


class TraceSource:
    """The requests of a trace, in groups that must keep their order: conversations, or single
    requests. A user takes the next free group."""

    def __init__(self, groups: Sequence[Sequence[Request]], note: str = "") -> None:
        """`note` names the omitted parts of the file, for display; empty for none."""
        self.note = note
        self.requests = [*_in_rounds(groups)]
        self._groups = deque(groups)

    def requests_of(self, user: int) -> Iterator[Request]:
        while self._groups:
            yield from self._groups.popleft()


def read_mooncake(path: Path) -> TraceSource:
    """Each prompt is its full blocks; blocks not found are new. Raises `ConfigError`."""
    try:
        prompts = recorded.read(path)
    except TraceError as error:
        raise ConfigError(f"mooncake_trace: {error}") from None
    groups = []
    for number, prompt in enumerate(prompts):
        request = _request(number, number, prompt.output_tokens, prompt.arrival_s)
        prefix = TraceEntry(prompt.blocks, prompt.input_tokens)
        groups.append([request._replace(prefix=(prefix,))])
    return TraceSource(groups)


def read_burst(path: Path) -> TraceSource:
    """Columns `Request tokens`, `Response tokens`, and optionally `Timestamp` in seconds; `Model`,
    `Total tokens`, `Log Type`, `Session ID` and `Elapsed time` are not needed. Requests without
    response tokens have failed, according to its authors, and are omitted. Raises
    `ConfigError`."""
    groups: list[list[Request]] = []
    line, num_failed, number = 1, 0, 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            for number, row in enumerate(rows):
                line = rows.line_num
                context, generation = (
                    _whole(row, column) for column in ("Request tokens", "Response tokens")
                )
                if not generation:
                    num_failed += 1
                    continue
                arrival_s = number * BURST_INTERVAL_S
                if row.get("Timestamp"):
                    arrival_s = seconds(row, "Timestamp")
                user = number % BURST_USERS
                request = _request(number, user, generation, arrival_s)
                new = Entry(Kind.TURN, max(1, context), user, number, 1)
                groups.append([request._replace(new=new)])
    except OSError as error:
        raise ConfigError(f"burst_trace_path: {path}: {error.strerror}") from None
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"burst_trace_path: {path}, line {line}: {error}") from None
    note = f"{num_failed} of {number + 1} requests of the trace had failed and are left out"
    return _not_empty(groups, "burst_trace_path", path, note if num_failed else "")


def read_sharegpt(path: Path, max_conversations: int) -> TraceSource:
    """A list of `{"id", "conversations": [{"from": "human" | "gpt", "value"}]}`. Each question with
    an answer is a turn, and the earlier questions are the beginning of its prompt. Ids are not
    needed, other roles are ignored, and a null text is empty. Raises `ConfigError`."""
    groups: list[list[Request]] = []
    for number, talk in enumerate(_conversations(path), 1):
        if len(groups) == max_conversations:
            break
        try:
            conversation = _conversation(len(groups), talk["conversations"])
        except (KeyError, TypeError):
            raise ConfigError(
                f"dataset_path: {path}, conversation {number} is not "
                '{"conversations": [{"from": …, "value": text}, …]}'
            ) from None
        if conversation:
            groups.append(conversation)
    arrivals = {
        (request.user, request.turn): place * SHAREGPT_INTERVAL_S
        for place, request in enumerate(_in_rounds(groups))
    }
    timed = [
        [request._replace(arrival_s=arrivals[request.user, request.turn]) for request in group]
        for group in groups
    ]
    return _not_empty(timed, "dataset_path", path)


def _conversations(path: Path) -> list[Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"dataset_path: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"dataset_path: {path}: {error}") from None
    if not isinstance(found, list):
        raise ConfigError(f"dataset_path: {path} is not a list of conversations")
    return found


def _whole(row: Mapping[str, str | None], column: str) -> int:
    text = row.get(column)
    if text is None:
        raise ValueError(f"there is no column {column!r}")
    if not text.strip().isdecimal():
        raise ValueError(f"{column} is {text!r}, not a whole number")
    return int(text)


def _conversation(number: int, messages: Sequence[dict[str, Any]]) -> list[Request]:
    requests: list[Request] = []
    history: list[Entry] = []
    between = [message for message in messages if message["from"] in (*_ASKS, *_ANSWERS)]
    for asked, answered in itertools.pairwise(between):
        if asked["from"] not in _ASKS or answered["from"] not in _ANSWERS:
            continue
        turn = len(history) + 1
        question, answer = (
            max(1, min(most, _characters(message["value"]) // CHARACTERS_PER_TOKEN))
            for message, most in zip((asked, answered), MAX_SHAREGPT_TOKENS, strict=True)
        )
        new = Entry(Kind.TURN, question, number, 0, turn)
        request = _request(turn - 1, number, answer, 0.0)
        requests.append(request._replace(prefix=tuple(history), new=new, turn=turn))
        history.append(new)
    return requests


def _characters(text: object) -> int:
    """Raises `TypeError` for a value that is neither text nor null."""
    if text is None:
        return 0
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    return len(text)


def _request(number: int, user: int, generation: int, arrival_s: float) -> Request:
    """Without a class: a trace has no targets of latency."""
    batch = QOS_BY_NAME["batch"]
    return Request(user, number, batch, "trace", 0.0, (), (), None, generation, 0, 1, arrival_s)


def _in_rounds(groups: Sequence[Sequence[Request]]) -> Iterator[Request]:
    """The first of each, then the second of each."""
    for turn in itertools.zip_longest(*groups):
        yield from (request for request in turn if request is not None)


def _not_empty(
    groups: Sequence[Sequence[Request]], setting: str, path: Path, note: str = ""
) -> TraceSource:
    if not groups:
        raise ConfigError(f"{setting}: {path} has no requests{f': {note}' if note else ''}")
    return TraceSource(groups, note)
