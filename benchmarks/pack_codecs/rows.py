"""Rows of KV cache as a real engine makes them, read from the packs of a real server's bucket."""

import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.engine.driver import EngineFailed, EngineSettings, Request
from benchmarks.engine.session import PATIENT
from benchmarks.engine.vllm_engine import VllmEngine
from examples.processes import RemoteServer
from examples.tiny_model import prompt_tokens
from remote_server.client import ClientConfig, RemoteClient
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.object_names import parse_name
from remote_server.values import GiB

BLOCK_TOKENS = 32
_WRITTEN_S = 60.0
_REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Rows(NamedTuple):
    """Rows of one model in one format of its KV cache."""

    model: str
    kv_dtype: str
    rows: list[bytes]

    @property
    def label(self) -> str:
        return f"{self.model} {self.kv_dtype}"

    @property
    def element_bytes(self) -> int:
        return 1 if self.kv_dtype.startswith("fp8") else 2


def text_prompts(model: Path, tokens: int, count: int) -> list[list[int]]:
    """Prompts of this repository's documents and code, `tokens` tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts: list[list[int]] = []
    files = [*sorted((_REPOSITORY / "docs").glob("*.md")), *sorted(_REPOSITORY.glob("*/*.py"))]
    ids: list[int] = []
    for file in files:
        ids += tokenizer.encode(file.read_text())
        while len(ids) >= tokens and len(prompts) < count:
            prompts.append(ids[:tokens])
            ids = ids[tokens:]
    return prompts


def random_prompts(tokens: int, count: int) -> list[list[int]]:
    """Prompts for a model with random weights."""
    return [prompt_tokens(tokens, seed=number) for number in range(count)]


def make_rows(model: Path, kv_dtype: str, prompts: Sequence[Sequence[int]]) -> Rows:
    """The KV cache of `prompts` in packs, by an engine with `kv_cache_dtype`. Raises
    `EngineFailed`, with the words of vLLM, where it cannot."""
    folder = Path(tempfile.mkdtemp(prefix="pack-codecs-"))
    try:
        with ExitStack() as stack:
            flags = ["--bucket", f"file://{folder}", "--bucket-admit", "all", "--no-populate"]
            server = stack.enter_context(
                RemoteServer("2GiB", args=[*flags, "--bucket-write-rate", "0"])
            )
            client = RemoteClient(ClientConfig(server.endpoint, client_name="observer"))
            stack.callback(client.close)
            settings = _settings(model, kv_dtype, len(prompts[0]), server.endpoint)
            engine = stack.enter_context(VllmEngine(settings))
            engine.run([Request(prompt, 1) for prompt in prompts])
            engine.settle()
            _wait_until_written(client)
        return Rows(model.name, kv_dtype, _read_packs(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settings(model: Path, kv_dtype: str, tokens: int, server: str) -> EngineSettings:
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    extra: dict[str, int | str] = {"kv_cache_memory_bytes": 1 * GiB}
    if kv_dtype != "bf16":
        extra["kv_cache_dtype"] = kv_dtype
    return EngineSettings(
        model=str(model), kv_bytes_per_token=per_token, max_model_len=tokens + 32,
        max_batched_tokens=512, max_num_seqs=2, block_tokens=BLOCK_TOKENS,
        connector={"cpu_pool": 1 * GiB, "server": server, "store_answers": False, **PATIENT},
        extra=extra,
    )  # fmt: skip


def _wait_until_written(client: RemoteClient) -> None:
    deadline = time.monotonic() + _WRITTEN_S
    before = -1
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = client.stats(timeout_s=10).result().counters["bucket_packs_written"]
        if now == before > 0:
            return
        before = now
    raise EngineFailed(f"the server wrote {before} packs within {_WRITTEN_S:g} s")


def _read_packs(folder: Path) -> list[bytes]:
    rows = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        named = parse_name(str(file.relative_to(folder)))
        if named is None:
            continue
        data = file.read_bytes()
        header = layout.decode_header(data, named.namespace, named.key)
        offsets = layout.offsets_of(header, layout.header_bytes_of(data))
        rows += [
            data[offset : offset + row.length]
            for row, offset in zip(header.rows, offsets, strict=True)
        ]
    return rows
