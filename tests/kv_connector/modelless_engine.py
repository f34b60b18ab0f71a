"""A whole engine without a model: vLLM's scheduler and block pool, our connector on both sides.

What it computes stands in `modelless_runner`.
"""

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_configs import LAYER
from modelless_runner import TOKENS, ModellessRunner, held
from scripted_client import Clock, ScriptedClient
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kv_connector import connector as connector_module
from kv_connector.connector import KVFerryConnector
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.weight_watch import models_of_caller
from kv_connector.tier.remote_tier import RemoteTier
from remote_server.protocol import KeyState


class ModellessEngine:
    """Steps as vLLM's engine core does. `schedule` and `execute` are its halves: with several
    batches under way the next one is scheduled before the last one was executed."""

    def __init__(self, config: Any, num_blocks: int) -> None:
        spec = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
        )
        cache = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)],
        )
        cache.kv_cache_layout = "LBNHC"
        config.cache_config.num_gpu_blocks = num_blocks
        self._model = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
        self._model.weight.fill_(1)
        self.memory = torch.zeros((num_blocks, spec.page_size_bytes), dtype=torch.int8)
        self._content = self.memory.numpy().view(np.int64)
        self.worker = KVFerryConnector(config, KVConnectorRole.WORKER, cache)
        self.runner = ModellessRunner(config, self.worker, {LAYER: self.memory})
        by_config: Any = config.scheduler_config.get_scheduler_cls()
        self.scheduler: Scheduler = by_config(
            config, cache, StructuredOutputManager(config), TOKENS
        )
        connector = self.scheduler.connector
        assert isinstance(connector, KVFerryConnector)
        self.connector = connector
        self.connector.set_xfer_handshake_metadata_pp_aware({})
        algorithm = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(TOKENS, algorithm)
        self._sent: dict[int, SchedulerOutput] = {}
        """What the worker was sent of each step that it has not run."""
        self.manager: Any = self.connector.scheduler.manager

    @property
    def client(self) -> ScriptedClient:
        assert self.connector._remote is not None
        client: Any = self.connector._remote._client
        return client

    def get_model(self) -> torch.nn.Module:
        """As vLLM's model runner: the connector finds the weights by it."""
        return self._model

    def load(self, weights: int) -> None:
        """Other weights, as `reload_weights` would: in place, and not reported."""
        self.runner.weights = weights
        self._model.weight.fill_(weights)

    # ── requests and steps ───────────────────────────────────────────────────────────────

    def add(
        self, name: str, tokens: Sequence[int], *, answer: int = 1000, lora: Any = None,
        **params: Any,
    ) -> Request:  # fmt: skip
        """A request that goes on until it is stopped, or has `answer` tokens."""
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        if params:
            sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            name, list(tokens), sampling, None, lora_request=lora, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        output: SchedulerOutput = self.scheduler.schedule()
        self._sent[id(output)] = pickle.loads(pickle.dumps(output))
        return output

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """The worker's half of a step: it has the output as it was when it was scheduled."""
        return self.runner.run(self._sent.pop(id(output)))

    def execute(self, output: SchedulerOutput) -> None:
        """The worker's half of a step, and what the scheduler learns from it."""
        self.scheduler.update_from_output(output, self.run(output))

    def step(self, times: int = 1) -> None:
        """Whole steps. The server holds nothing, and takes what it is offered."""
        for _ in range(times):
            self.execute(self.schedule())
            if self.connector._remote is not None:
                self.client.reply_to_all(KeyState.ABSENT, loads=False)

    def start(self, *names: str) -> None:
        """Step until these requests have their first token."""
        self._step_until(lambda: all(self.scheduler.requests[n].num_output_tokens for n in names))

    def abort(self, *names: str) -> None:
        """Their clients hang up."""
        for name in names:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def finish(self, *names: str) -> None:
        """Abort them, and store what was under way."""
        self.abort(*names)
        self.step()
        self._step_until(lambda: not self.connector.scheduler._jobs)

    def _step_until(self, done: Callable[[], bool]) -> None:
        for _ in range(2000):
            if done():
                return
            self.step()
        raise AssertionError("it does not come to that")

    def reset(self, *, running: bool = False) -> bool:
        """As `/reset_prefix_cache?reset_external=true`."""
        return self.scheduler.reset_prefix_cache(running, reset_connector=True)

    # ── what is where ────────────────────────────────────────────────────────────────────

    def pool(self) -> dict[bytes, int | None]:
        """The contents of the pool's readable rows, by key."""
        rows = np.frombuffer(self.manager.primary_tier.get_kv_memoryview(), np.int64)
        rows = rows.reshape(self.manager.primary_tier._num_chunks, -1)
        firsts, alike = rows[:, 0].tolist(), (rows == rows[:, :1]).all(axis=1).tolist()
        return {
            bytes(key): firsts[chunk.chunk_id] if alike[chunk.chunk_id] else None
            for key, chunk in self.manager.primary_tier._policy.chunks.items()
            if chunk.is_ready
        }

    def keys(self, request: Request) -> list[bytes]:
        """The keys of its whole blocks."""
        return [bytes(make_offload_key(one, 0)) for one in request.block_hashes]

    def keys_of(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the whole blocks of a prompt."""
        sampling = SamplingParams(max_tokens=1)
        return self.keys(Request("", list(tokens), sampling, None, block_hasher=self._hasher))

    def stored(self, request: Request) -> list[int | None]:
        """What the pool has of this request, from its first block on."""
        pool, found = self.pool(), list[int | None]()
        for key in self.keys(request):
            if key not in pool:
                break
            found.append(pool[key])
        return found

    def block(self, request: Request, index: int) -> int | None:
        """The contents of a block of the engine that this request holds."""
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        return held(self._content[ids[index]])

    def totals(self) -> dict[tuple[str, str], int]:
        return (
            self.connector._remote.counters.totals() if self.connector._remote is not None else {}
        )

    def hook_errors(self) -> dict[tuple[str, str], int]:
        return {k: n for k, n in self.totals().items() if k[0] == "kvferry_hook_errors"}

    def shutdown(self) -> None:
        self.worker.shutdown()
        self.connector.shutdown()


Make = Callable[..., ModellessEngine]


@contextmanager
def modelless_engines(
    model: Path,
    folder: Path,
    patch: pytest.MonkeyPatch,
    client_factory: Callable[[Any], ScriptedClient] = ScriptedClient,
    clock: Clock | None = None,
) -> Iterator[Make]:
    """A maker of such engines, which end with it. Their server is what the test answers, and
    `clock` is the one of their tier: on a busy machine no wait is longer."""
    made: list[ModellessEngine] = []
    patch.setitem(RemoteTier.__init__.__kwdefaults__, "client_factory", client_factory)
    patch.setitem(RemoteTier.__init__.__kwdefaults__, "clock", clock or Clock())
    patch.setattr(connector_module, "run_self_tests", lambda *_: Report(Outcome.PASSED))

    def make(
        *,
        num_blocks: int = 64,
        server: str | None = "tcp://127.0.0.1:1",
        arguments: Mapping[str, Any] = {},
        watched: bool = True,
        ahead: bool = False,
        second_runner: bool = False,
        **settings: Any,
    ) -> ModellessEngine:
        """`arguments` are vLLM's, `settings` the connector's. Whether the weights are `watched`,
        whether steps are scheduled `ahead` (vLLM's asynchronous scheduling), and whether for its
        second model runner."""
        finds = models_of_caller if watched else lambda: None
        patch.setattr("kv_connector.identity.weight_watch.models_of_caller", finds)
        own = folder / f"model-{len(made)}"
        shutil.copytree(model, own)
        extra = {"cpu_pool": "1MiB", "server": server, "break_even": False, **settings}
        config = EngineArgs(
            model=str(own),
            block_size=TOKENS,
            max_model_len=1024,
            enforce_eager=True,
            async_scheduling=False,
            **arguments,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVFerryConnector",
                kv_connector_module_path="kv_connector.connector",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            ),
        ).create_engine_config()
        config.scheduler_config.async_scheduling = ahead  # vLLM turns it off on a CPU
        if second_runner:
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # not before: vLLM demands Triton
        # The worker is in the scheduler's process, so they agree on the pool's file.
        config.parallel_config.distributed_executor_backend = "uni"
        made.append(ModellessEngine(config, num_blocks))
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.shutdown()


@pytest.fixture
def make(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> Iterator[Make]:
    with modelless_engines(model, tmp_path, monkeypatch, clock=clock) as make:
        yield make
