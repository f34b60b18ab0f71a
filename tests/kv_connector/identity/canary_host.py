"""A worker and a server for canaries, and a server that damages what it returns."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiered_engine import serve
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kv_connector.identity import self_test
from kv_connector.identity.self_test import Fixture, Part
from kv_connector.pool.sharing import Place
from kv_connector.pool.worker import HostWorker
from remote_server.client import SharedRegion
from remote_server.server.server import Server
from remote_server.store.gets import Found, Pinned
from remote_server.turns import Steps

BLOCKS, ROWS, PAGE, STRIDE = 24, 12, 96, 4096


class PoolRegion:
    """What the worker needs of vLLM's shared region, in sealed memory that a server can map."""

    def __init__(self, start: int) -> None:
        self.memory = SharedRegion(ROWS * STRIDE)
        self._tensor = torch.frombuffer(self.memory.view, dtype=torch.int8).view(ROWS, STRIDE)
        self._used = start

    def create_next_worker_view(self, num_bytes: int) -> torch.Tensor:
        self._used += num_bytes
        return self._tensor[:, self._used - num_bytes : self._used]

    def cleanup(self) -> None:
        pass


class Host:
    """One worker with its engine blocks and its part of the pool's rows."""

    def __init__(self, groups: int = 1, blocks_per_row: int = 1, rank: int = 0) -> None:
        layers = 4
        self.cache = torch.zeros((layers, BLOCKS, PAGE), dtype=torch.int8)
        tensors = [CanonicalKVCacheTensor(layer, PAGE) for layer in self.cache]
        each = layers // groups
        refs = [
            [CanonicalKVCacheRef(i, PAGE) for i in range(g * each, (g + 1) * each)]
            for g in range(groups)
        ]
        self.kv_caches = CanonicalKVCaches(tensors, refs)
        self.num_bytes = layers * PAGE * blocks_per_row
        self.start = rank * self.num_bytes
        self.region = PoolRegion(self.start)
        self.worker = HostWorker(self.kv_caches, self.region, blocks_per_row)
        self.blocks_per_row = blocks_per_row
        self.made = 0

    def stage(self) -> Fixture:
        self.made += 1
        memory = self.region.memory
        part = Part(
            memory.view, memory.fd, Place(0, ROWS, STRIDE, self.start, self.num_bytes),
            block_bytes=self.num_bytes * 2,
        )  # fmt: skip
        return Fixture(self.worker, self.kv_caches, part, self.blocks_per_row)


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No canary and no part of it ends because a machine is busy."""
    for name in ("CANARY_S", "ATTACHING_S", "_HANG_S"):
        monkeypatch.setattr(self_test, name, 200.0)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, and time for it to answer on any machine."""
    be_patient(monkeypatch)
    with serve() as server:
        yield server
    server.store.tier_stack.check()


MakeHost = Callable[..., Host]


@pytest.fixture
def make_host() -> Iterator[MakeHost]:
    """Hosts whose cache and pool must be as they were when the test is over."""
    hosts: list[Host] = []

    def make(**settings: int) -> Host:
        hosts.append(Host(**settings))
        return hosts[-1]

    yield make
    for host in hosts:
        host.worker.shutdown()
        assert not host.cache.any(), "the canary left its bytes in the engine's cache"
        assert not any(host.region.memory.view), "the canary left its bytes in the pool"


def damage(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block that it returns has a wrong byte."""
    find = server.store.gets.find

    def damaged(*asked: Any, **how: Any) -> Steps[Pinned | Found]:
        found = yield from find(*asked, **how)
        assert isinstance(found, Pinned)
        for block in found.blocks:
            server.store.memory.view(block)[5] ^= 1
        return found

    monkeypatch.setattr(server.store.gets, "find", damaged)
