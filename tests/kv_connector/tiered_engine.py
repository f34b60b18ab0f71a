"""vLLM's own tiering manager over our tier and a pool in plain memory: an engine but no model."""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from scripted_client import (
    BLOCK_BYTES,
    ROW_BYTES,
    STEP_END,
    TOKENS_PER_BLOCK,
    Clock,
    Counted,
    ScriptedClient,
    spec_of_tier,
)
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kv_connector.tier.remote_tier import RemoteTier
from remote_server.client import RemoteClient
from remote_server.server.config import ServerConfig
from remote_server.server.server import Server
from remote_server.values import MiB

PATIENCE_S = 60.0

UNHURRIED = {"patience": 1000, "max_wait_ms": 600_000, "put_timeout_ms": 600_000}
"""Limits that no busy host exceeds."""


def key_of(number: int) -> OffloadKey:
    return make_offload_key(f"{number:032d}".encode(), 0)


def block_of(number: int) -> bytes:
    return (number.to_bytes(8, "big") * (BLOCK_BYTES // 8 + 1))[:BLOCK_BYTES]


class TieredEngine(Counted):
    """Stores and looks up as vLLM's scheduler does. Block `n` has the bytes `block_of(n)`."""

    def __init__(
        self,
        num_rows: int = 40,
        *,
        client_factory: Callable[[Any], Any] = ScriptedClient,
        clock: Callable[[], float] | None = None,
        server: str = "tcp://127.0.0.1:1",
        name: str = "engine",
        bare: bool = False,
        more_tiers: Callable[..., list[Any]] = lambda *_: [],
        **settings: Any,
    ) -> None:
        self.pool = np.zeros((num_rows, ROW_BYTES), np.int8)
        self.clock: Any = clock or Clock()
        region = SimpleNamespace(
            create_kv_memoryview=lambda: memoryview(self.pool), cleanup=lambda: None
        )
        self.primary = CPUPrimaryTierOffloadingManager(num_rows, region)
        view = self.primary.get_kv_memoryview()
        spec = spec_of_tier(name, pp_size=1)

        def make_client(config: Any) -> Any:
            self.client: Any = client_factory(config)
            return self.client

        self.tier = RemoteTier(
            spec, view, "RemoteTier", sees_everything=not bare, client_factory=make_client,
            clock=self.clock, server=server, **settings,
        )  # fmt: skip
        self.tier.declare("model", {"model": "m"})
        self.manager = TieringOffloadingManager(self.primary, [self.tier, *more_tiers(spec, view)])

    # ── what a scheduler does ────────────────────────────────────────────────────────────

    def request(
        self, name: str, numbers: Sequence[int], **params: Any
    ) -> tuple[ReqContext, list[OffloadKey]]:
        context = ReqContext(name, kv_transfer_params=params or None)
        keys = [key_of(number) for number in numbers]
        for i, key in enumerate(keys):
            context.set_offload_key_position(key, (i + 1) * TOKENS_PER_BLOCK)
        self.manager.on_new_request(context)
        return context, keys

    def compute(
        self, name: str, numbers: Sequence[int], *, known: int | None = None, **params: Any
    ) -> list[OffloadKey]:
        """Compute these blocks and store them in the pool, which offers them to the tier. The
        copy into the pool takes an engine step. The request was admitted with `known` tokens."""
        context, keys = self.request(name, numbers)
        if known is not None:
            self.tier.admitted(name, [], known)
        context.kv_transfer_params = params or None
        prepared = self.manager.prepare_store(keys, context)
        assert prepared is not None, "no row to be had"
        stored = list(prepared.keys_to_store)
        for key, row in zip(stored, prepared.store_spec.chunk_ids, strict=True):
            number = numbers[keys.index(key)]
            self.pool[row, :BLOCK_BYTES] = np.frombuffer(block_of(number), np.int8)
        self.step()
        self.manager.complete_store(stored, context)
        self.manager.on_request_finished(context)
        return keys

    def lookup(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[str]:
        return [self.manager.lookup(key, context).name for key in keys]

    def step(self, *new_requests: str) -> None:
        self.manager.on_schedule_end(
            ScheduleEndContext(new_requests, ()) if new_requests else STEP_END
        )

    def run(self, context: ReqContext, keys: Sequence[OffloadKey]) -> list[str]:
        """Look up and step, in real time, until nothing is deferred any more."""
        deadline = time.monotonic() + PATIENCE_S
        while {"RETRY", "HIT_PENDING"} & set(found := self.lookup(context, keys)):
            assert time.monotonic() < deadline, f"still deferred: {found}"
            self.step()
            time.sleep(0.002)
        return found

    def idle(self) -> None:
        """Step as vLLM does without requests: while there is work."""
        deadline = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "the engine would step for ever"
            self.step()
            time.sleep(0.002)

    # ── what must hold ───────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """No job is left, no row is pinned, and every row is free or holds one block."""
        for _ in range(2):
            self.step()
        assert not self.manager._jobs
        assert all(not state.is_finished for state in self.manager._req_state.values())
        chunks = self.primary._policy.chunks
        assert all(chunk.ref_cnt == 0 for chunk in chunks.values()), "a row stayed pinned"
        used = [chunk.chunk_id for chunk in chunks.values()] + self.primary._free_list
        assert sorted(used) == list(range(self.primary._num_allocated_chunks))
        assert not self.hook_errors(), self.hook_errors()


# ── real clients and servers ─────────────────────────────────────────────────────────────────


def real_engine(server: str, **settings: Any) -> TieredEngine:
    """An engine whose client is real. Neither its limits nor measured speeds decide anything."""
    given: dict[str, Any] = {
        "client_factory": RemoteClient, "clock": time.monotonic, "break_even": False,
        **UNHURRIED, **settings,
    }  # fmt: skip
    return TieredEngine(server=server, **given)


def ready(engine: TieredEngine) -> TieredEngine:
    """Once its client is."""
    deadline = time.monotonic() + PATIENCE_S
    while not engine.client.ready:
        assert time.monotonic() < deadline, "the client is not ready"
        time.sleep(0.002)
    engine.step()
    return engine


def serve(memory: int = 16 * MiB) -> Server:
    return Server(ServerConfig(bind="tcp://127.0.0.1:*", memory=memory, populate=False))
