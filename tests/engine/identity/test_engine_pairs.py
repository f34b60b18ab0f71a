"""Pairs of real engines, one after the other against one server: equal ones share, others never.

The first engine stores a prompt. Each of the others differs from it in one thing, asks for the
same prompt, and finds the blocks of the first or does not. With `-s` a table is printed. Every
single fact is in `kv_connector/identity/test_facts.py`; here are some that a real engine takes at
its start.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector

from examples.processes import StartFailed
from examples.tiny_model import prompt_tokens

pytestmark = [pytest.mark.whole, pytest.mark.timeout(3600)]

PROMPT = prompt_tokens(640 + 3, seed=970)


class Pair(NamedTuple):
    """How the second engine differs from the first."""

    shares: bool
    args: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    in_another_folder: bool = False


PAIRS: dict[str, Pair] = {
    "nothing: started again": Pair(True),
    "the folder's name": Pair(True, in_another_folder=True),
    "seed, shorter sequences": Pair(True, args=["--seed", "7", "--max-model-len", "2048"]),
    "dtype": Pair(False, args=["--dtype", "float32"]),
    "KV dtype": Pair(False, args=["--kv-cache-dtype", "fp8"]),
    "block size": Pair(False, args=["--block-size", "64"]),
    "rows of two blocks": Pair(False, settings={"blocks_per_row": 2}),
    "namespace": Pair(False, settings={"namespace": "mine"}),
}


def test_equal_engines_share_and_different_ones_never(cluster: Cluster, model: Path, logs: Path):
    with Engine(
        model, connector=connector(cluster.server.endpoint, **PATIENT), args=ENGINE_ARGS,
        log=logs / "first.log",
    ) as first:  # fmt: skip
        first.when_ready()
        expected = first.ask(PROMPT)
        first.settle()
    wrong = []
    for number, (name, pair) in enumerate(PAIRS.items()):
        if "fp8" in pair.args and "avx512f" not in Path("/proc/cpuinfo").read_text():
            print(f"{name:30} not run: vLLM's fp8 on a CPU needs AVX-512")
            continue
        try:
            answer, tokens = second(pair, cluster, model, logs, f"pair-{number}")
        except StartFailed:
            shared, found = None, 0
        else:
            found = tokens["server"]
            shared = found > 0
            same = found == 640 // BLOCK * BLOCK and answer.agrees_with(expected)
        if shared != pair.shares or (shared and not same):
            wrong.append(name)
        verdict = {None: "no start"}.get(shared, "yes" if shared else "no")
        print(f"{name:30} shared: {verdict:8} {found} tokens from the server")
    assert wrong == []


def second(pair: Pair, cluster: Cluster, model: Path, logs: Path, name: str) -> tuple[Any, Any]:
    """What an engine of this pair answers, and where the prompt's tokens came from."""
    folder = model
    if pair.in_another_folder:
        folder = shutil.copytree(model, logs / name, dirs_exist_ok=True)
    settings = connector(cluster.server.endpoint, **PATIENT, **pair.settings)
    with Engine(
        folder, connector=settings, args=[*ENGINE_ARGS, *pair.args],
        log=logs / f"{name}.log",
    ) as engine:  # fmt: skip
        engine.when_ready()
        return engine.ask_from(PROMPT)
