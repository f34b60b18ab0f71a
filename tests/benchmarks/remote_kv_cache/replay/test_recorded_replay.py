"""A recorded run, replayed, finds what the server found when it was recorded."""

import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_server import eventually

from benchmarks.remote_kv_cache.replay.caches.room import memory_for
from remote_server.cli.__main__ import main
from remote_server.cli.traces import record
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import Stretch
from remote_server.server.config import ServerConfig
from remote_server.server.reports import recording
from remote_server.server.server import Server
from remote_server.traces import read
from remote_server.traces.model_cache import OneLevel, key_of
from remote_server.traces.replay import prompts_of

pytestmark = pytest.mark.real_time

PATIENCE_S = 60.0
NAMESPACE = "model"
BLOCK_BYTES, BLOCK_TOKENS = 1024, 16
ROOM = memory_for(1200, BLOCK_BYTES)
TURNS = 2000
MOST_APART = 0.5
"""In points of the found share."""


class Turn(NamedTuple):
    """A prompt, and the blocks of its answer."""

    at_s: float
    prompt: list[int]
    answer: list[int]


def conversations(seed: int) -> Iterator[Turn]:
    """Some two hundred at a time, each of which goes on or ends; all begin with the same blocks."""
    chance, new, now = random.Random(seed), count(4), 0.0
    open_ones: list[list[int]] = []
    while True:
        now += chance.expovariate(2.0)
        place = int(chance.expovariate(1 / 60))
        blocks = open_ones.pop(place) if place < len(open_ones) else [*range(4)]
        prompt = [*blocks, *(next(new) for _ in range(chance.randint(1, 9)))]
        answer = [next(new) for _ in range(chance.randint(0, 3))]
        yield Turn(now, prompt, answer)
        if chance.random() < 0.8:
            open_ones.insert(0, [*prompt, *answer])
            del open_ones[200:]


class Engine:
    """A client that loads what it finds, and puts the rest with the answer."""

    def __init__(self, endpoint: str) -> None:
        self.client = RemoteClient(ClientConfig(endpoint, lanes=0))
        self.client.declare(NAMESPACE, BLOCK_BYTES)
        eventually(lambda: self.client.ready)
        self.row = memoryview(bytearray(BLOCK_BYTES))
        self.requested = self.found = 0

    def serve(self, turn: Turn) -> None:
        keys = [key_of(block) for block in turn.prompt]
        chain = [Stretch(len(keys), 0, 0, BLOCK_TOKENS)]
        reply = self.client.lookup(NAMESPACE, keys, chain=chain, timeout_s=PATIENCE_S)
        found = reply.result(PATIENCE_S).prefix
        self.requested += len(keys)
        self.found += found
        if found:
            rows = [self.row] * found
            got = self.client.get(
                NAMESPACE, keys[:found], rows, stall_s=PATIENCE_S, timeout_s=PATIENCE_S
            )
            assert len(got.result(PATIENCE_S).landed) == found
        new = [*keys[found:], *(key_of(block) for block in turn.answer)]
        if new:
            chain = [Stretch(len(new), 0, found * BLOCK_TOKENS, BLOCK_TOKENS)]
            done = self.client.put(
                NAMESPACE, new, [self.row] * len(new), chain=chain, deferred=False,
                timeout_s=PATIENCE_S,
            )  # fmt: skip
            assert done.result(PATIENCE_S).error is None


def recorded(
    path: Path, policy: Any, turns: Sequence[Turn], monkeypatch: pytest.MonkeyPatch
) -> Engine:
    """An engine's `turns` on a server of `ROOM` with this policy, recorded into `path`."""
    now = [0.0]
    stop = threading.Event()
    monkeypatch.setattr(recording, "IDLE_S", float("inf"))  # the server's time flies
    monkeypatch.setattr(record, "POLL_S", 0.05)
    monkeypatch.setattr(record, "_stopped_by_signals", lambda: nullcontext(stop))
    config = ServerConfig(
        bind="tcp://127.0.0.1:*", memory=ROOM.num_bytes, populate=False, eviction=policy
    )
    with Server(config, lambda: now[0]) as server:
        engine = Engine(server.endpoint)
        flags = ["--server", server.endpoint, "--timeout-s", "60"]
        command = threading.Thread(target=main, args=(["record", str(path), *flags],))
        command.start()
        recorder = server.tenants[""].handlers.recorder
        eventually(lambda: recorder.recording is not None, "it records")
        for turn in turns:
            now[0] = turn.at_s
            engine.serve(turn)
        stop.set()
        command.join(PATIENCE_S)
        assert server.store.all_counters()["evicted"] > ROOM.places, "the memory was too small"
        engine.client.close()
    return engine


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_a_recorded_run_replays_to_the_same_found_tokens(policy, tmp_path, monkeypatch):
    made = conversations(1)
    turns = [next(made) for _ in range(TURNS)]
    path = tmp_path / "trace.jsonl"
    engine = recorded(path, policy, turns, monkeypatch)
    _, *lines, last = map(json.loads, path.read_text().splitlines())
    lookups = [line for line in lines if line["type"] == "lookup"]
    assert (len(lookups), last["lost"]) == (TURNS, 0)
    assert sum(line["found"] for line in lookups) == engine.found
    answers = sum(len(line["hash_ids"]) for line in lines if line["type"] == "put")
    assert answers == sum(len(turn.answer) for turn in turns), "of puts only those of answers"
    trace = read(path)
    assert trace.recorded_found == engine.found
    level, found = OneLevel(ROOM.places, policy, trace.block_tokens), 0
    for prompt in prompts_of(trace):
        if prompt.is_put:
            level.put(prompt.arrival_s, prompt.keys)
        else:
            start = prompt.start * BLOCK_TOKENS
            found += level.request(prompt.arrival_s, prompt.keys, start=start)[0]
    shares = [100 * each / engine.requested for each in (engine.found, found)]
    assert 20 < shares[0] < 95
    assert abs(shares[0] - shares[1]) < MOST_APART
