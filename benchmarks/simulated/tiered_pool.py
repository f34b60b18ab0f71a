"""vLLM's tiering manager over a CPU pool and a tier, driven as vLLM's scheduler drives it.

The manager, the pool's index and its eviction are vLLM's own; the rows are real memory, which a
server on this host may map. The engine is missing: the caller gives a prompt's blocks, fills the
rows of computed blocks, and reads the rows of loaded ones.
"""

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kv_connector.tier.remote_tier import RemoteTier
from kv_connector.vllm.features import CacheHitSource
from remote_server.client import SharedRegion

MakeTier = Callable[[Any, memoryview], SecondaryTierManager]
"""Makes a tier from vLLM's offloading spec and the pool's rows."""


def key_of(number: int) -> OffloadKey:
    """A block's key, of the length of an engine's keys."""
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Prompt:
    """One request in service: its blocks' keys, in order."""

    def __init__(self, name: str, keys: Sequence[OffloadKey], tokens_per_block: int) -> None:
        self.context = ReqContext(name)
        self.keys = keys
        for number, key in enumerate(keys, 1):
            self.context.set_offload_key_position(key, number * tokens_per_block)


class TieredPool:
    """The rows, their index, and one tier below. Used by one thread."""

    def __init__(
        self,
        num_rows: int,
        block_bytes: int,
        tokens_per_block: int,
        make_tier: MakeTier | None,
        *,
        eviction: str = "lru",
        name: str = "simulated",
    ) -> None:
        """Without `make_tier` the pool works alone. `eviction` is vLLM's name of the pool's
        policy: `lru` or `arc`."""
        self._tokens_per_block = tokens_per_block
        self._region = SharedRegion(num_rows * block_bytes, "kvferry-simulated-pool")
        flat = np.frombuffer(self._region.view, np.uint8)
        flat.fill(0)  # an engine page-locks its pool at start; later page faults would be measured
        self.rows: npt.NDArray[np.uint8] = flat.reshape(num_rows, block_bytes)
        """One block in each: `rows[n]` belongs to the engine, for writing between `store` and
        `stored`, and for reading between `load` and `loaded`."""
        region = SimpleNamespace(
            create_kv_memoryview=lambda: self.rows.data,
            cleanup=lambda: None,
            fd=self._region.fd,
        )
        self._primary = CPUPrimaryTierOffloadingManager(num_rows, region, cache_policy=eviction)
        spec = SimpleNamespace(
            tokens_per_block=(tokens_per_block,),
            blocks_per_chunk=1,
            cpu_page_size_per_worker=block_bytes,
            replicated_layout=False,
            config=SimpleNamespace(
                engine_id=name,
                parallel=SimpleNamespace(world_size=1),
                groups=(SimpleNamespace(group_id=0, tokens_per_block=tokens_per_block),),
            ),
            _scheduler_mmap=region,
        )
        view = self._primary.get_kv_memoryview()
        self.tier = None if make_tier is None else make_tier(spec, view)
        tiers = [] if self.tier is None else [self.tier]
        self._manager = TieringOffloadingManager(self._primary, tiers)

    # ── a scheduler's calls for one request, in this order ───────────────────────────────

    def begin(self, name: str, keys: Sequence[OffloadKey]) -> Prompt:
        """Begin a request. `name` is unique until this one is finished."""
        prompt = Prompt(name, keys, self._tokens_per_block)
        self._manager.on_new_request(prompt.context)
        return prompt

    def find(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> int | None:
        """How many of `keys`, from the first, are in the pool now; None: retry in the next step.

        Scans on behind unknown keys, as vLLM does, so that one lookup in the tier and one
        promotion from it cover the whole prompt.
        """
        found, later = 0, False
        for key in keys:
            result = self._manager.lookup(key, prompt.context)
            if result is LookupResult.MISS:
                break
            found += result is LookupResult.HIT
            later |= result is not LookupResult.HIT
        return None if later else found

    def find_as_the_connector(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> int | None:
        """`find`, with what the connector does around it: no walk over the keys while our tier has
        no news of the request, and a record of the blocks that it reuses."""
        assert isinstance(self.tier, RemoteTier)
        name = prompt.context.req_id
        if self.tier.still_waits(name):
            return None
        found = self.find(prompt, keys)
        if found is None:
            self.tier.deferred(name, keys)
        else:
            self.tier.admitted(name, keys[:found])
        return found

    def num_from_pool(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> int:
        """How many of `keys`, which were found, no tier had to load for this request."""
        sources = (self._manager.get_load_source(key, prompt.context) for key in keys)
        return sum(source is CacheHitSource.HOST for source in sources)

    def load(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> list[int]:
        """Pin and return the rows of `keys`, which were found in this step."""
        if not keys:
            return []
        return list(map(int, self._manager.prepare_load(keys, prompt.context).chunk_ids))

    def loaded(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> None:
        """The engine has copied these rows."""
        if keys:
            self._manager.complete_load(keys, prompt.context)

    def store(
        self, prompt: Prompt, keys: Sequence[OffloadKey]
    ) -> tuple[list[OffloadKey], list[int]]:
        """Reserve rows for computed blocks: the keys to be stored, and the row of each.

        Fewer than given when some are in the pool already, none when every row is pinned.
        """
        if not keys or (output := self._manager.prepare_store(keys, prompt.context)) is None:
            return [], []
        return list(output.keys_to_store), list(map(int, output.store_spec.chunk_ids))

    def stored(self, prompt: Prompt, keys: Sequence[OffloadKey]) -> None:
        """The engine has written the rows of `keys`; the tier is offered them."""
        if keys:
            self._manager.complete_store(keys, prompt.context)

    def holds(self, key: OffloadKey) -> bool:
        """Whether a row holds `key`, or will when its transfer ends."""
        return self._primary._policy.get(key) is not None

    def finish(self, prompt: Prompt) -> None:
        """The request has ended."""
        self._manager.on_request_finished(prompt.context)

    # ── its calls in every step ──────────────────────────────────────────────────────────

    def step(self, admitted: Sequence[str] = ()) -> None:
        """End a scheduler's step in which the requests `admitted` were first scheduled."""
        self._manager.on_schedule_end(ScheduleEndContext(tuple(admitted), ()))

    @property
    def busy(self) -> bool:
        """Whether a transfer to or from the tier is in flight."""
        return bool(self._manager._jobs)

    def settle(self, timeout_s: float = 60.0, pause_s: float = 0.0001) -> None:
        """Step until no transfer is left. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        self.step()
        while self.busy:
            if time.monotonic() > deadline:
                raise TimeoutError(f"transfers did not end within {timeout_s:g} s")
            time.sleep(pause_s)
            self.step()

    def check(self) -> None:
        """Assert, with no transfer in flight, that no request and no pin is left, and that each
        row is free or holds one block."""
        self.settle()
        assert not self._manager._req_state, "a request was not finished"
        policy, primary = self._primary._policy, self._primary
        used = sum(policy.get(key) is not None for key in self._keys_seen())
        free = len(primary._free_list) + primary._num_chunks - primary._num_allocated_chunks
        assert used + free == primary._num_chunks, f"{used} used, {free} free"
        assert primary._num_evictable_cache_chunks == used, "a row stayed pinned"

    def _keys_seen(self) -> set[OffloadKey]:
        policy = self._primary._policy
        held = [getattr(policy, name, {}) for name in ("chunks", "t1", "t2")]
        return {key for group in held for key in group}

    def reset(self) -> None:
        """Empty the pool, as vLLM's reset of its caches does: the tier begins a new epoch. Call it
        only with no transfer in flight and no request begun."""
        self._manager.reset_cache()

    def close(self) -> None:
        """End the tier and free the memory."""
        self._manager.shutdown()
        del self.rows
        self._region.close()


def remote_tier(server: str | Sequence[str], namespace: str, **settings: Any) -> MakeTier:
    """Our tier and its client, as the connector makes them, with this setting `server`."""

    def make(spec: Any, view: memoryview) -> RemoteTier:
        tier = RemoteTier(spec, view, "RemoteTier", sees_everything=True, server=server, **settings)
        tier.declare(namespace, {"model": namespace})
        return tier

    return make


def wait_ready(pool: TieredPool, timeout_s: float = 10.0, attach_s: float = 3.0) -> None:
    """Wait until the pool's remote tier can use its server. Raises `TimeoutError`.

    Shared memory is awaited for `attach_s`, where both sides support it: mapping takes a while,
    and an engine takes longer to start. After `attach_s` the transport is tcp.
    """
    assert isinstance(pool.tier, RemoteTier)
    client = pool.tier._client
    began = time.monotonic()
    if not client.wait_until_ready(timeout_s):
        raise TimeoutError(f"the server did not answer within {timeout_s:g} s")
    if pool.tier._config.transport == "auto":
        while client.transport != "shm" and time.monotonic() - began < attach_s:
            time.sleep(0.005)
