"""The steps of the demonstration, and their numbers by what the machine has."""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine import presets
from benchmarks.engine.presets import PAPER
from benchmarks.harness import machine
from benchmarks.remote_kv_cache import test_transfer_in, test_transfer_out
from remote_server.values import GiB

HOUR_S = 3600.0

MOST_RANKS = 4
"""Of the demo's model, which has four key heads."""

_OUT, _IN = test_transfer_out.MODULE, test_transfer_in.MODULE
_BLOCK_BYTES_KEPT = 0.9
"""The part of the server's memory that blocks may fill; the rest is slots of other sizes."""


class Where(NamedTuple):
    """What decides which steps can run, and with which numbers."""

    num_gpus: int
    on_cpu: bool
    """Small numbers, on purpose without a GPU."""

    has_vllm: bool
    available: int
    """Free bytes of memory."""

    model: str = ""
    """The folder with the weights of the paper's model; empty: where vLLM finds them."""

    can_plot: bool = False

    @property
    def has_weights(self) -> bool:
        return presets.weights_are_here(self.model or test_transfer_in.PRESETS[PAPER].model)


@dataclass(frozen=True)
class Step:
    """A command, or the reason for none."""

    name: str
    question: str
    words: Sequence[str] = ()
    """Behind `python -m`."""

    limit_s: float = HOUR_S
    has_record: bool = False
    why_not: str = ""

    def command(self, folder: Path, *, plot: bool) -> list[str]:
        files: list[str] = []
        if self.has_record:
            files = ["--json", str(self.record(folder))]
            files += ["--plot", str(self.record(folder).with_suffix(".svg"))] if plot else []
        return [sys.executable, "-m", *self.words, *files]

    def record(self, folder: Path) -> Path:
        return folder / f"{self.file_name}.json"

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")


def look(*, on_cpu: bool, model: str) -> Where:
    """This machine. Imports neither torch nor vLLM."""
    return Where(
        machine.num_gpus(), on_cpu, importlib.util.find_spec("vllm") is not None,
        machine.available_bytes(), model, importlib.util.find_spec("matplotlib") is not None,
    )  # fmt: skip


def steps(where: Where) -> list[Step]:
    """All steps in order."""
    if where.on_cpu or where.num_gpus:
        reason = "" if where.has_vllm else "vLLM is not installed in this Python"
    else:
        reason = "no GPU: CUDA's driver finds no device"
    made = [_demo(), _exactness(), _parallel(where), _out(where), _in(where)]
    return [step if not reason else _without(step, reason) for step in made]


def _without(step: Step, reason: str) -> Step:
    return Step(step.name, step.question, why_not=reason)


def _demo() -> Step:
    return Step("demo", "Does a prompt's KV cache come back from each level?", ["examples.demo"])


def _exactness() -> Step:
    words = ["pytest", "tests/engine/test_exactness.py", "-q", "-p", "no:cacheprovider"]
    why_not = "" if importlib.util.find_spec("pytest") else "needs pytest, which is not installed"
    question = "Are the answers of every level those of an engine without a connector?"
    return Step("exactness", question, words, why_not=why_not)


def _parallel(where: Where) -> Step:
    question = "Do the parts of several workers come back from each level?"
    ranks = max((n for n in (1, 2, MOST_RANKS) if n <= where.num_gpus), default=1)
    why_not = "" if ranks > 1 else f"needs two GPUs, this machine has {where.num_gpus}"
    if where.on_cpu and not where.num_gpus:
        why_not = "needs two GPUs"
    words = ["examples.demo", "--tensor-parallel", str(ranks)]
    return Step("tensor parallelism", question, words, why_not=why_not)


def _out(where: Where) -> Step:
    question = "What does copying KV cache out cost an engine, with sync and async scheduling?"
    numbers: list[str] = []
    if where.on_cpu:
        numbers = ["--max-num-batched-tokens", "1024,256", "--engine-cache", "on", "--trials", "2"]
    elif where.has_weights:
        numbers = [*_paper(where.model), *_memory(where.available, pools=4, server=40 * GiB)]
    return Step("transfer out", question, [_OUT, *numbers], 2 * HOUR_S, has_record=True)


def _in(where: Where) -> Step:
    question = "What does loading KV cache from the server gain an engine?"
    if where.on_cpu:
        numbers = ["--hit-rate", "0,0.5,1", "--engine-cache", "off", "--trials", "2"]
    elif not where.has_weights:
        name = where.model or test_transfer_in.PRESETS[PAPER].model
        why_not = f"no weights of {name} here, and none is downloaded: --model names their folder"
        return Step("transfer in", question, why_not=why_not)
    else:
        memory = _memory(where.available, pools=1, server=512 * GiB)
        numbers = [*_paper(where.model), *memory]
        kept = int(memory[3]) if memory else 512 * GiB
        if (prompts := num_prompts(kept)) < test_transfer_in.PRESETS[PAPER].num_prompts:
            numbers += ["--num-prompts", str(prompts)]
    return Step("transfer in", question, [_IN, *numbers], 2 * HOUR_S, has_record=True)


def _paper(model: str) -> list[str]:
    return ["--preset", PAPER, *(["--model", model] if model else [])]


def _memory(available: int, *, pools: int, server: int) -> list[str]:
    """Flags for pool and server where the preset's do not fit; nothing where they do."""
    pool = 40 * GiB
    if server + pools * (pool + 2 * GiB) <= available * 0.85:
        return []
    pool = min(pool, int(available * 0.3 / pools))
    return ["--cpu-pool", str(pool), "--memory-space", str(min(server, int(available * 0.4)))]


def num_prompts(memory_space: int) -> int:
    """Prompts whose blocks fit into the server: the second pass expects all of the first, and adds
    as many unknown ones."""
    numbers = test_transfer_in.PRESETS[PAPER]
    shared = sum(1 - rate for rate in numbers.hit_rate) + 1
    rounds = numbers.trials + 1
    of_one = rounds * shared * numbers.input_len * numbers.shape.bytes_per_token
    most = int(memory_space * _BLOCK_BYTES_KEPT / of_one)
    return max(1, min(numbers.num_prompts, most))


def named(text: str, all_steps: Sequence[Step]) -> list[Step]:
    """Steps by parts of their names, with commas between them. Raises `ValueError`."""
    chosen = []
    for part in text.split(","):
        word = part.strip().lower()
        found = [step for step in all_steps if word and word in step.name]
        if not found:
            raise ValueError(f"{part!r} is in none of: {', '.join(s.name for s in all_steps)}")
        chosen += found
    return [step for step in all_steps if step in chosen]
