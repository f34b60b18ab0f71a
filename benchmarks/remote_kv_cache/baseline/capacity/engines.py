"""Engines that one server's loop carries, computed from the measured costs of its messages.

A request is one lookup of its prompt's blocks, one get of those found, a put after each step of the
prefill, and a put of each block of the answer. A get or a put is as many messages as the client
makes of its bytes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.harness.record import Figure
from benchmarks.remote_kv_cache.baseline.capacity.costs import (
    BLOCKS,
    GET,
    LARGE,
    LARGE_BLOCKS,
    LOOKUP_ABSENT,
    LOOKUP_FOUND,
    LOOKUP_KEYS,
    PUT,
    Call,
    Cost,
)
from remote_server.client import ClientConfig
from remote_server.client.lanes import get, put
from remote_server.values import MiB

MOST_OF_A_CORE = 0.7
LOOP, SHARE, ENGINES, RATE = "loop, ms a request", "loop's share", "engines", "GB/s of these"

MESSAGE, EACH, OF_BYTES = "a message", "each key or block", "a message that moves MiB"
"""Microseconds of the loop."""

_CONFIG = ClientConfig("tcp://127.0.0.1:1")


class KvModel(NamedTuple):
    name: str
    bytes_per_token: int


MODELS = (
    KvModel("Llama-3.1-8B", 32 * 2 * 8 * 128 * 2),
    KvModel("DeepSeek-V2-Lite (MLA)", 27 * 576 * 2),
)
"""Of 16 bits a number; a latent of 512 and a key of 64 for each of 27 layers."""


class Load(NamedTuple):
    """The requests of one engine."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    step_tokens: int
    """Prompt tokens that a step of the engine computes."""

    block_tokens: int


class Linear(NamedTuple):
    """Microseconds of a call of n keys or blocks: `base` + n × `each`."""

    base: float
    each: float

    def of(self, number: float) -> float:
        return self.base + number * self.each


def line_of(costs: Mapping[Call, Cost], operation: str, transport: str) -> Linear | None:
    """Through the least and the most keys or blocks; None where one was not measured."""
    numbers = LOOKUP_KEYS if operation in (LOOKUP_FOUND, LOOKUP_ABSENT) else BLOCKS
    few, many = numbers[0], numbers[-1]
    first = costs.get(Call(operation, few, transport))
    last = costs.get(Call(operation, many, transport))
    if first is None or last is None:
        return None
    each = max(0.0, (last.loop - first.loop) / (many - few))
    return Linear(max(0.0, first.loop - few * each), each)


def lines_of(costs: Mapping[Call, Cost], transports: Sequence[str]) -> list[Figure]:
    """A figure for each operation and transport: the cost of a message, and of each key or block
    in it."""
    figures = []
    for operation in (LOOKUP_FOUND, LOOKUP_ABSENT, PUT, GET):
        for transport in transports:
            line = line_of(costs, operation, transport)
            if line is not None:
                large = costs.get(Call(operation, LARGE_BLOCKS, transport, LARGE))
                values = {MESSAGE: line.base, EACH: line.each}
                if large is not None:
                    values[OF_BYTES] = message_cost(large, line)
                figures.append(Figure(f"message of a {operation}", "µs", values, transport))
    return figures


def messages_of(num_bytes: int, operation: str, transport: str) -> int:
    """The least that the client's default windows allow for one put or get: over lanes one for each
    lane, from a MiB on."""
    if transport == "shm":
        return -(-num_bytes // (_CONFIG.shared_window_bytes // 2))
    under_way = put.UNDER_WAY if operation == PUT else get.UNDER_WAY
    by_lanes = min(_CONFIG.lanes, -(-num_bytes // MiB))
    return max(by_lanes, -(-num_bytes * under_way // _CONFIG.lane_window_bytes))


def assumptions(load: Load) -> dict[str, str]:
    """For the record, and to be printed."""
    return {
        "a request": f"{load.prompt_tokens:,} prompt tokens, {load.output_tokens:,} of the answer",
        "requests a second of an engine": f"{load.requests_per_s:g}",
        "blocks": f"of {load.block_tokens} tokens, each with one key",
        "calls": f"one lookup, one get, a put after {load.step_tokens:,} prompt tokens, a put of "
        "each block of the answer",
        "messages": "as many as the client makes of a call's bytes, at the cost of those that move "
        f"{LARGE_BLOCKS} blocks of {LARGE // MiB} MiB",
        "the loop": f"at most {MOST_OF_A_CORE:.0%} of a core; one call at a time, so that no two "
        "share a turn of the loop",
    }


def table_of(
    costs: Mapping[Call, Cost], transports: Sequence[str], load: Load, founds: Sequence[float]
) -> list[Figure]:
    """A figure for each model, share of the prompt found and transport whose costs are known.
    Lookups are those of the first transport."""
    figures = []
    for model in MODELS:
        for transport in transports:
            for found in founds:
                figure = _figure(costs, model, transport, transports[0], load, found)
                if figure is not None:
                    figures.append(figure)
    return figures


def _figure(
    costs: Mapping[Call, Cost], model: KvModel, transport: str, first: str, load: Load,
    found: float,
) -> Figure | None:  # fmt: skip
    hits, misses = (line_of(costs, each, first) for each in (LOOKUP_FOUND, LOOKUP_ABSENT))
    puts, gets = (line_of(costs, each, transport) for each in (PUT, GET))
    a_put = costs.get(Call(PUT, 1, transport))
    if hits is None or misses is None or puts is None or gets is None or a_put is None:
        return None
    block_bytes = model.bytes_per_token * load.block_tokens
    blocks = load.prompt_tokens // load.block_tokens
    num_found = round(found * blocks)
    num_new = blocks - num_found
    num_output = load.output_tokens // load.block_tokens
    base = max(hits.base, misses.base) + num_found * hits.each + num_new * misses.each
    total = base + num_output * a_put.loop
    total += _transfer(costs, gets, GET, transport, num_found, block_bytes)
    step = max(1, load.step_tokens // load.block_tokens)
    for begin in range(0, num_new, step):
        number = min(step, num_new - begin)
        total += _transfer(costs, puts, PUT, transport, number, block_bytes)
    share = load.requests_per_s * total / 1e6
    engines = MOST_OF_A_CORE / share
    num_bytes = (blocks + num_output) * block_bytes
    values = {
        LOOP: total / 1e3,
        SHARE: share,
        ENGINES: engines,
        RATE: engines * load.requests_per_s * num_bytes / 1e9,
    }
    return Figure(f"engines: {model.name}, {found:.0%} found", "", values, transport)


def _transfer(
    costs: Mapping[Call, Cost], line: Linear, operation: str, transport: str,
    number: int, block_bytes: int,
) -> float:  # fmt: skip
    """Microseconds of the loop for one put or get."""
    if not number:
        return 0.0
    large = costs.get(Call(operation, LARGE_BLOCKS, transport, LARGE))
    messages = float(messages_of(number * block_bytes, operation, transport))
    if large is not None:  # over shared memory the first message of a call is small
        of_large = messages_of(LARGE_BLOCKS * LARGE, operation, transport)
        messages += max(0.0, large.messages - of_large)
    return messages * message_cost(large, line) + number * line.each


def message_cost(large: Cost | None, line: Linear) -> float:
    """Of a message that moves MiB, without its blocks: bytes drive the loop's code out of the
    cache, so it costs more than one of small blocks. `large` is the cost of a call of such."""
    if large is None:
        return line.base
    return max(line.base, (large.loop - LARGE_BLOCKS * line.each) / max(1.0, large.messages))
