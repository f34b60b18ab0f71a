"""What `gpu_check` does on a GPU: copies of every layout, and page-locking of another's pool."""

import argparse
import os

import cuda_stand_in
import numpy as np
import pytest
from cuda_stand_in import Driver

from benchmarks.gpu_check import copies, layouts, pool_holder, registration
from benchmarks.gpu_check.device import CPU, find
from benchmarks.gpu_check.layouts import APART, CROSS_LAYER, TOGETHER, Cache, Shape
from benchmarks.gpu_check.mapped_pool import MappedPool
from benchmarks.harness.record import Record, Row
from benchmarks.harness.runner import Runner
from kv_connector.pool.pool_file import offer_sealed_file, pool_path

SMALL = [Shape(96 << 10, 6)]
WAYS = len(layouts.LAYOUTS) * 2


@pytest.fixture
def record() -> Record:
    return Record("benchmarks.gpu_check", "python -m benchmarks.gpu_check")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> argparse.Namespace:
    """A small shape, one trial."""
    monkeypatch.setattr(copies, "SHAPES", SMALL)
    return argparse.Namespace(total_mib=1, region_mib=4, trials=1, json=None)


def by_name(record: Record) -> dict[tuple[str, str | None], Row]:
    return {(row.operation, row.transport): row for row in record.rows}


@pytest.mark.parametrize("where", ["GPU", "CPU"])
def test_every_layout_is_copied_both_ways_and_every_byte_compared(where, record, small):
    driver = Driver()
    device = cuda_stand_in.gpu(driver) if where == "GPU" else find(CPU)
    with Runner(1, 0) as runner:
        copies.measure(device, record, runner, small)
    assert [row.reason for row in record.rows if row.reason] == []
    assert len(record.rows) == len(SMALL) * 2 * (2 + WAYS)
    assert {row.model for row in record.rows} == {str(shape) for shape in SMALL}
    wall = by_name(record)[copies.WALL, copies.LOAD]
    one = by_name(record)[f"{TOGETHER}, {copies.BATCHED}", copies.LOAD]
    assert wall.num_bytes == one.num_bytes and one.wall == copies.WALL
    assert one.ratio_to_wall == pytest.approx(one.seconds / wall.seconds)
    if where == "GPU":
        assert record.parameters["page-locked"] is True
        assert {*driver.orders} == {1, 3}, "loads in any order, stores in that of the stream"


def test_a_copy_that_loses_bytes_is_a_failure_and_no_time(record, small):
    with Runner(1, 0) as runner:
        copies.measure(cuda_stand_in.gpu(Driver(num_dropped=1)), record, runner, small)
    for (operation, _), row in by_name(record).items():
        if copies.BATCHED in operation:
            assert row.sample.failed.startswith("WrongBytes: ") and row.seconds is None
        else:
            assert row.seconds


@pytest.mark.parametrize(("layout", "pieces"), [(CROSS_LAYER, 1), (TOGETHER, 4), (APART, 8)])
def test_a_row_is_one_layer_after_another_whatever_the_layout(layout, pieces):
    device, shape = find(CPU), Shape(64, 4)
    pool = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64)
    blocks_of, rows = np.array([2, 0, 1]), np.array([0, 1, 2])
    cache = Cache(device, layout, shape, blocks_of, rows)
    assert len(cache.tensors) == pieces
    device.copies.one_by_one(cache.pieces(pool.ctypes.data), load=True)
    page = 64 // pieces
    for block, row in zip(blocks_of, rows, strict=True):
        for place, tensor in enumerate(cache.tensors):
            begin = place * page
            assert tensor[block].tolist() == pool[row, begin : begin + page].tolist()
    assert cache.equals(cache.expected(pool))
    cache.poison(0xA5)
    assert not cache.equals(cache.expected(pool))


def test_a_pool_of_another_process_is_locked_and_both_see_each_other_s_bytes(record, small):
    with Runner(1, 0) as runner:
        registration.measure(cuda_stand_in.gpu(Driver()), record, runner, small)
    rows = by_name(record)
    assert [row.reason for row in record.rows if row.reason] == []
    assert rows["page-lock it", None].num_bytes == 4 << 20
    assert rows["a registration that fails is seen", None].seconds is not None
    assert record.parameters["page-locked"] is True
    assert record.parameters["pool"] == "by the connector's own function"
    assert cuda_stand_in.Torch.registered == {}, "it was unregistered"


def test_a_pool_that_cannot_be_locked_is_a_failure_that_names_the_code(record, small):
    device = cuda_stand_in.gpu(Driver(), most_bytes=1 << 20)
    with Runner(1, 0) as runner:
        registration.measure(device, record, runner, small)
    rows = by_name(record)
    assert "cudaHostRegister returned 1" in rows["page-lock it", None].reason
    assert "CUDA reports the pool as pageable" in rows["it is page-locked", None].reason
    assert rows["the device reads what the other process wrote", None].seconds
    assert record.parameters["page-locked"] is False and runner.num_failed == 2


def test_a_holder_that_ends_at_once_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(OSError, match="the process that makes the pool has ended"):
        MappedPool(find(CPU), 1 << 20)


def test_the_pool_made_without_the_connector_is_as_its_own():
    import fcntl

    name = f"kvferry-gpu-check-test-{os.getpid()}"
    ours = pool_holder.make_like_connector(1 << 20)
    theirs = offer_sealed_file(name, 1 << 20)
    assert theirs is not None
    try:
        seals = [fcntl.fcntl(each, fcntl.F_GET_SEALS) for each in (ours.descriptor, theirs)]
        assert seals[0] == seals[1]
        assert os.fstat(ours.descriptor).st_size == os.fstat(theirs).st_size
        assert os.readlink(pool_path(name)) == f"/proc/{os.getpid()}/fd/{theirs}"
        assert str(ours.path) == f"/proc/{os.getpid()}/fd/{ours.descriptor}"
    finally:
        pool_path(name).unlink()
        os.close(theirs)
        os.close(ours.descriptor)
