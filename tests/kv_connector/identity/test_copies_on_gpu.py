"""The canary on a GPU: its writes come before its copies, and its copies before its comparison.

vLLM's own worker of a GPU copies, on streams that run nothing before it must.
"""

import numpy as np
import pytest
from gpu_stand_in import Gpu, Stream, use_gpu
from laid_out_worker import HYBRIDS, MakeWorker, Worker
from real_connector import FULL, Layers, group_of
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from kv_connector.identity.self_test import Outcome, Report, run_self_test
from remote_server.client import ClientConfig
from remote_server.server.server import Server

ONE_GROUP: tuple[str, list[Layers]] = ("LBHNC", [group_of(0, FULL, 3)])

STRANGER, OWN = 0x11, 0x22

CACHES = {"one group": ONE_GROUP, **HYBRIDS}


@pytest.fixture(params=[False, True], ids=["late copies", "eager copies"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return use_gpu(monkeypatch, eager=request.param)


def canary(worker: Worker, server: Server) -> Report:
    return run_self_test(worker.spec.self_test_fixture, ClientConfig(server.endpoint))


@pytest.mark.parametrize("cache", CACHES)
def test_it_passes_and_restores_what_it_borrowed(
    make_worker: MakeWorker, gpu: Gpu, server: Server, cache: str
):
    worker = make_worker(*CACHES[cache])
    memory = worker.backing()
    memory[:] = np.random.default_rng(1).integers(-128, 128, len(memory), np.int8)
    before, rows = memory.copy(), worker.rows.copy()
    assert canary(worker, server).outcome is Outcome.PASSED
    gpu.computation.synchronize()
    assert (memory == before).all() and (worker.rows == rows).all()


def test_a_copy_that_does_not_wait_for_its_writes_fails_it(
    make_worker: MakeWorker, server: Server, monkeypatch: pytest.MonkeyPatch
):
    use_gpu(monkeypatch, eager=True)
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)
    report = canary(make_worker(*ONE_GROUP), server)
    assert report.outcome is Outcome.FAILED and report.miscopied


def test_a_copy_that_is_not_waited_for_does_not_pass_it(
    make_worker: MakeWorker, server: Server, monkeypatch: pytest.MonkeyPatch
):
    use_gpu(monkeypatch)
    worker = make_worker(*ONE_GROUP)
    monkeypatch.setattr(CPUOffloadingWorker, "wait", lambda *_: None)
    assert canary(worker, server).outcome is Outcome.BROKEN


def test_a_second_rank_clears_nothing_of_the_first_one(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
):
    use_gpu(monkeypatch)
    worker = make_worker(*HYBRIDS["a group with fewer layers"], rank=1, ranks=2)
    own = worker.spec._place_of(1)
    rows = worker.spec._region.base_tensor.numpy().reshape(own.num_rows, own.stride)
    assert (own.rank, own.start) == (1, own.num_bytes) and own.stride >= 2 * own.num_bytes
    rows[:] = STRANGER
    worker.backing()[:] = OWN
    worker.copy(1, block=5, row=3, store=True)
    assert (rows[3, : own.start] == STRANGER).all()
    values, counts = np.unique(rows[3, own.start : own.start + own.num_bytes], return_counts=True)
    num_own = sum(layer.nbytes for layer in worker.own(1, 5))
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {
        0: own.num_bytes - num_own, OWN: num_own,
    }  # fmt: skip
