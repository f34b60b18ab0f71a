"""`vllm serve` as a real process, with the requests that tests and the demo need."""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.machine import num_gpus
from examples.processes import LoggedProcess, free_port

Prompt = str | Sequence[int]

# vLLM's names for the levels that cached prompt tokens come from. It has none for a remote store.
CACHE_LEVELS = {"engine": "device", "pool": "host", "server": "external_unspecified"}


Verdict = Literal["equal", "tied", "wrong"]

TIED = 0.1
"""Logprobs within this of each other are equal. The logits have 16 bits, and other requests of a
step move a logprob by up to 0.05: without any connector one answer in a hundred differs between a
queue and a single request, at a token whose two best candidates are this close."""


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt, and its times."""

    text: str
    token_ids: list[int]
    # One entry per generated token: the log probability of each candidate, named `token_id:17` and
    # not by its text, because many tokens of a byte-level vocabulary have the same text. Empty
    # when no logprobs were requested.
    logprobs: list[dict[str, float]]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # from sending the request to the first token; the whole reply if not streamed
    total_s: float
    usage: dict[str, Any] = field(repr=False)

    def compared_with(self, reference: "Completion") -> Verdict:
        """`equal`, `tied` or `wrong`, by the first token that differs: after another token the
        text is another. Both have the same length, and `reference` has its logprobs."""
        pairs = zip(self.token_ids, reference.token_ids, strict=True)
        for place, (token, expected) in enumerate(pairs):
            if token != expected:
                candidates = reference.logprobs[place]
                best, other = (candidates.get(f"token_id:{each}") for each in (expected, token))
                is_tied = best is not None and other is not None and best - other <= TIED
                return "tied" if is_tied else "wrong"
        return "equal"

    def agrees_with(self, reference: "Completion") -> bool:
        """Whether the two are equal or differ only at a tie."""
        return self.compared_with(reference) != "wrong"


class EngineError(RuntimeError):
    """The engine answered a request with an error."""


class VllmServer(LoggedProcess):
    """An engine on the CPU or the GPU, according to the build of its vLLM.

    Every engine gets the same settings, with a connector or without, so that engines can be
    compared. `connector` is the value of `--kv-transfer-config`; `args` come last and take
    precedence.
    """

    name = "vllm"
    start_timeout_s = 240.0

    def __init__(
        self,
        model: Path | str,
        *,
        connector: Mapping[str, Any] | None = None,
        port: int = 0,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        self.model = str(model)
        self.port = port or free_port()
        command = [
            *(sys.executable, str(Path(sys.executable).with_name("vllm")), "serve", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--kv-cache-memory-bytes", str(1 << 30)),
            *("--max-num-seqs", "8", "--no-enable-log-requests"),
        ]
        if num_gpus():
            # Several engines share one GPU. vLLM wants this part of its memory to be free at its
            # start, also where the size of the KV cache is given.
            command += ["--gpu-memory-utilization", "0.15"]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        super().__init__([*command, *args], {**engine_environment(), **(env or {})}, log)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def is_ready(self) -> bool:
        try:
            with self._request("GET", "/health", timeout_s=5):
                return True
        except (OSError, EngineError):
            return False

    def complete(
        self,
        prompt: Prompt,
        max_tokens: int = 16,
        *,
        stream: bool = True,
        logprobs: int | None = 5,
        extra: Mapping[str, Any] | None = None,
        timeout_s: float = 300,
    ) -> Completion:
        """Continue `prompt` greedily by exactly `max_tokens` tokens. `extra` overrides any field.

        May be called from several threads at once.
        """
        body = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": logprobs,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            **(extra or {}),
        }
        began = time.perf_counter()
        with self._request("POST", "/v1/completions", body, timeout_s) as response:
            chunks, first = [], None
            for chunk in _events(response) if stream else iter([json.load(response)]):
                if "error" in chunk:
                    raise EngineError(chunk["error"])
                if chunk["choices"] and first is None:
                    first = time.perf_counter()
                chunks.append(chunk)
        ended = time.perf_counter()
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        usage = chunks[-1]["usage"]
        return Completion(
            text="".join(choice["text"] for choice in choices),
            token_ids=[token for choice in choices for token in choice["token_ids"] or []],
            logprobs=[
                candidates
                for choice in choices
                if choice.get("logprobs")
                for candidates in choice["logprobs"]["top_logprobs"]
            ],
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            ttft_s=(first or ended) - began,
            total_s=ended - began,
            usage=usage,
        )

    def metrics(self) -> dict[str, float]:
        """Every Prometheus sample, by its name and labels as printed: `a_total{b="c"}`."""
        with self._request("GET", "/metrics") as response:
            return parse_metrics(response.read().decode())

    def metric(self, name: str) -> float:
        """The sum of a metric's samples over all labels; 0 when it has none."""
        samples = self.metrics().items()
        return sum(value for sample, value in samples if sample.partition("{")[0] == name)

    def cached_by_level(self) -> dict[str, int]:
        """Prompt tokens since the start that were not computed, by level."""
        return tokens_by_level(self.metrics())

    def reset_prefix_cache(self, timeout_s: float = 10, *, external: bool = False) -> None:
        """Empty the engine's own prefix cache, once no request or transfer holds a block.

        `external` resets the connector as well, which empties its CPU pool.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
            with self._request("POST", path) as response:
                answer = response.read().decode()
            if "false" not in answer.lower():
                return
            if time.monotonic() > deadline:
                raise EngineError(f"the prefix cache stays in use: {answer}")
            time.sleep(0.05)

    @contextmanager
    def _request(
        self, method: str, path: str, body: Any = None, timeout_s: float = 60
    ) -> Iterator[HTTPResponse]:
        # http.client and not urllib: it never uses a proxy for a loopback address.
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise EngineError(f"{method} {path}: {response.status} {response.read().decode()}")
            yield response
        except HTTPException as error:  # the engine closed the connection within an answer
            raise EngineError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()


def parse_metrics(text: str) -> dict[str, float]:
    """The samples of a Prometheus page, by their names and labels as printed."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    samples = (line.rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in samples}


def tokens_by_level(metrics: Mapping[str, float]) -> dict[str, int]:
    """The value of `VllmServer.cached_by_level`, from the samples of its page."""
    cached = _by_label(metrics, "vllm:prompt_tokens_cached_by_source_total", "source")
    if cached:
        return {level: cached.get(source, 0) for level, source in CACHE_LEVELS.items()}
    # vLLM 0.31 counts what came from below its own cache as one source.
    sources = _by_label(metrics, "vllm:prompt_tokens_by_source_total", "source")
    server = _by_label(metrics, "kvferry_reused_tokens_total", "level").get("server", 0)
    below = sources.get("external_kv_transfer", 0)
    return {
        "engine": sources.get("local_cache_hit", 0), "pool": below - server, "server": server
    }  # fmt: skip


def _by_label(metrics: Mapping[str, float], name: str, label: str) -> dict[str, int]:
    """The samples of one metric, summed by the value of one of their labels."""
    found: dict[str, int] = {}
    for sample, value in metrics.items():
        if sample.startswith(name + "{"):
            named = sample.partition(f'{label}="')[2].partition('"')[0]
            found[named] = found.get(named, 0) + int(value)
    return found


def engine_environment() -> dict[str, str]:
    """The environment of every engine here, so that two of them can be compared."""
    # vLLM keeps one core free for its scheduler, and one more when a connector is configured: on a
    # small machine the two kinds of engine would compute on different numbers of cores, and a
    # comparison would measure that. So all engines get the same cores, named here. One is excluded,
    # because without a spare core the computing threads spin while others wait for theirs.
    cores = sorted(os.sched_getaffinity(0))
    cores = cores[:-1] or cores
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        # vLLM compiles the ranking of logprobs even in eager mode: 2 to 17 s within the first
        # request for them, and it needs a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to the end of the stream."""
    for line in response:
        if line.startswith(b"data: ") and (data := line[6:].strip()) != b"[DONE]":
            yield json.loads(data)
