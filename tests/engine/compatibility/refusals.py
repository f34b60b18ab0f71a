"""What kvferry refuses at start, each tried on a real engine, with the sentence of its log."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from cluster import ENGINE_ARGS, ENGINE_BLOCKS, QuickEngine, connector
from hybrid_model import build_hybrid
from model_builders import build_latent
from model_kinds import Build

from examples.processes import StartFailed

NOBODY = "tcp://127.0.0.1:1"


class Case(NamedTuple):
    """An engine that must not start, and a part of the sentence in which it is refused."""

    sentence: str
    args: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    env: Mapping[str, str] = {}
    build: Build | None = None
    """None for the small model."""

    in_multi: bool = False
    """Two connectors in one `MultiConnector`."""


CASES = {
    "an unknown setting": Case("unknown setting 'severs'", settings={"severs": NOBODY}),
    "a wrong value": Case("blocks_per_row", settings={"blocks_per_row": 0}),
    "rows of several blocks where a group keeps only the end of a prefix": Case(
        "which keeps only the end of a prefix",
        ("--num-gpu-blocks-override", str(3 * ENGINE_BLOCKS)), {"blocks_per_row": 4},
        build=build_hybrid,
    ),
    "keys that differ by process": Case(
        "makes different keys in every process", ("--prefix-caching-hash-algo", "xxhash")
    ),
    "a backend that computes prompts without the prefix that is loaded": Case(
        "vLLM computes a prompt without the prefix that is loaded",
        ("--attention-backend", "CPU_MLA", "--num-gpu-blocks-override", str(3 * ENGINE_BLOCKS)),
        build=build_latent,
    ),
    "a model that pools all tokens of a prompt": Case(
        "this model pools all tokens of a prompt",
        ("--runner", "pooling", "--convert", "embed", "--pooler-config",
         '{"seq_pooling_type": "MEAN"}', "--max-num-batched-tokens", "6144"),
    ),
    "two connectors of kvferry": Case("an engine can have one connector of kvferry", in_multi=True),
    "pipeline stages with unequal layers": Case(
        "give every pipeline stage the same number of layers",
        ("--pipeline-parallel-size", "2"),
        env={"VLLM_PP_LAYER_PARTITION": "2,4"},
    ),
}  # fmt: skip


class Refused(NamedTuple):
    """How one case ended."""

    case: str
    sentence: str
    """Of the error that the engine logged; empty if it started."""

    loaded: bool
    """Whether the model's weights were loaded before."""


def refuse(name: str, case: Case, small: Path, folder: Path) -> Refused:
    """Start the engine of one case."""
    folder.mkdir(parents=True)
    log = folder / "engine.log"
    given = connector(NOBODY, **case.settings)
    if case.in_multi:
        given = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [given, given]},
        }
    model = small if case.build is None else case.build(folder / "model", small)
    engine = QuickEngine(
        model, connector=given, args=[*ENGINE_ARGS, *case.args], log=log,
        separate_worker=bool(case.args),
    )  # fmt: skip
    engine.env.update(case.env)
    try:
        with engine:
            return Refused(name, "", loaded=True)
    except StartFailed:
        text = log.read_text(errors="replace")
    found = re.search(rf"ConfigError: (.*{re.escape(case.sentence)}.*)$", text, re.M)
    sentence = re.sub(r"/dev/shm/\S+", "/dev/shm/…", found[1]) if found else ""
    return Refused(name, sentence, "Loading weights took" in text)


def refuse_all(small: Path, folder: Path) -> list[Refused]:
    """All cases, two beside each other."""
    with ThreadPoolExecutor(2) as threads:
        tried = [
            threads.submit(refuse, name, case, small, folder / str(number))
            for number, (name, case) in enumerate(CASES.items())
        ]
        return [each.result() for each in tried]
