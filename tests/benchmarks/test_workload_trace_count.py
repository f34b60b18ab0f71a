"""Replayed traces: hits equal a count over the trace when no block is evicted or early."""

import json
import random
from pathlib import Path

import fake_time
import pytest

from benchmarks.storage_workload import trace_count, traces
from benchmarks.storage_workload.backend import ReadDone
from benchmarks.storage_workload.driver import Driver, Pace
from benchmarks.storage_workload.emulated import EmulatedBackend
from benchmarks.storage_workload.entries import Blocks
from benchmarks.storage_workload.models import MODELS, shape_of
from benchmarks.storage_workload.samples import RequestSample

SHAPE = shape_of(MODELS["tiny-1b"], traces.MOONCAKE_BLOCK_TOKENS, 1 / 64)


class Forgetful(EmulatedBackend):
    """Never finds more than one block."""

    async def read(self, blocks: Blocks) -> ReadDone:
        return await super().read(blocks.part(0, 1))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts that begin like an earlier one, up to some block."""
    draw = random.Random(5)
    prompts: list[list[int]] = []
    lines, unused = [], 0
    for number in range(200):
        begin = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        begin = begin[: draw.randrange(len(begin) + 1)]
        new = [*range(unused, unused + draw.randint(1, 6))]
        unused += len(new)
        prompts.append(begin + new)
        lines.append(
            {
                "timestamp": number * 100, "input_length": 512 * len(prompts[-1]),
                "output_length": 10, "hash_ids": prompts[-1],
            }
        )  # fmt: skip
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def replay(path: Path, backend: EmulatedBackend, users: int) -> list[RequestSample]:
    async def run() -> list[RequestSample]:
        driver = Driver(traces.read_mooncake(path), backend, SHAPE, Pace())
        await driver.run_users(users, 1e6)
        return driver.samples.requests

    return fake_time.run(run())


def test_one_user_after_another_finds_exactly_what_the_count_finds(trace: Path):
    answered = replay(trace, EmulatedBackend(1e9), users=1)
    beside = trace_count.beside(traces.read_mooncake(trace).requests, answered)
    assert beside is not None and beside["requests"] == 200
    assert beside["off_points"] == 0 and 0.2 < beside["findable"] < 0.9


def test_a_store_that_forgets_is_below_the_count(trace: Path):
    answered = replay(trace, Forgetful(1e9), users=1)
    beside = trace_count.beside(traces.read_mooncake(trace).requests, answered)
    assert beside is not None and beside["off_points"] < -10
