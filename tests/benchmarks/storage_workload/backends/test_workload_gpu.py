"""The GPU tier, with a CPU as its device: its blocks, its reads, its accounts."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import cupy_stand_in
import numpy as np
import pytest
import torch

from benchmarks.storage_workload.backends.backend import Backend, Part
from benchmarks.storage_workload.backends.emulated import EmulatedBackend, NoTier
from benchmarks.storage_workload.backends.gpu import library as device_library
from benchmarks.storage_workload.backends.gpu import tier as gpu_tier
from benchmarks.storage_workload.backends.gpu.library import (
    CupyLibrary,
    Library,
    NoDevice,
    TorchLibrary,
)
from benchmarks.storage_workload.backends.gpu.rows import DeviceRows, row_bytes_for
from benchmarks.storage_workload.backends.gpu.tier import GpuTier
from benchmarks.storage_workload.backends.host.store import StoreHost
from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.figures.accounting import lines_of_gpu
from benchmarks.storage_workload.figures.samples import TransferSample
from benchmarks.storage_workload.pages import report
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs import run
from benchmarks.storage_workload.traffic.entries import Blocks
from remote_server.errors import ConfigError

MiB = 1 << 20
BLOCK = 10_001  # no multiple of a word
PAYLOAD = Payload(1, BLOCK, noise_bytes=MiB)
ON_CPU = TorchLibrary(torch, "cpu")


@pytest.fixture(params=["torch", "cupy"])
def library(request: pytest.FixtureRequest) -> Library:
    """torch on the CPU, and CuPy's half on a stand-in that has its names."""
    return ON_CPU if request.param == "torch" else CupyLibrary(cupy_stand_in)


def blocks(*numbers: int) -> Blocks:
    """Of these numbers; every fifth is shorter."""
    return Blocks(
        [number.to_bytes(8, "big") for number in numbers],
        [BLOCK if number % 5 else 777 for number in numbers],
    )


@contextmanager
def above(below: Backend, num_rows: int, payload: Payload = PAYLOAD) -> Iterator[GpuTier]:
    budget = num_rows * row_bytes_for(BLOCK)
    with GpuTier(below, BLOCK, budget, payload, ON_CPU, check_every=1) as tier:
        yield tier


@contextmanager
def gpu(where: str, num_rows: int, folder: Path) -> Iterator[GpuTier]:
    with ExitStack() as stack:
        below: Backend = NoTier()
        if where == "emulated":
            below = EmulatedBackend(1e12)
        elif where != "alone":
            disk = 64 * MiB if where == "disk" else 0
            below = stack.enter_context(StoreHost(BLOCK, 32 * MiB, disk, folder, PAYLOAD))
        yield stack.enter_context(above(below, num_rows))


def by_tier(parts: Sequence[Part]) -> dict[str, int]:
    return {part.tier: part.blocks for part in parts}


def books(
    tier: GpuTier, counters: dict[str, int], moved: list[tuple[str, Part]]
) -> dict[str, bool]:
    occupancy = asyncio.run(tier.occupancy())["gpu"]
    transfers = [TransferSample(0, 0, 0, "", way, *part, 0) for way, part in moved]
    lines = lines_of_gpu(transfers, counters, occupancy, tier.row_bytes)
    return {line.what: line.agrees for line in lines}


def test_rows_hold_exactly_what_was_stored_in_them_whatever_the_order(library: Library):
    rows = DeviceRows(library, 7, row_bytes_for(BLOCK), 5)
    given = blocks(1, 2, 5, 3)
    for place, (key, length) in enumerate(zip(*given, strict=True)):
        PAYLOAD.fill(rows.staging(place, length).data, key)
    assert rows.store([6, 0, 3, 2], given.lengths) > 0
    assert rows.read([2, 3, 0, 6]) > 0
    for place, (key, length) in enumerate(zip(*[each[::-1] for each in given], strict=True)):
        expected = np.zeros(length, np.uint8)
        PAYLOAD.fill(expected.data, key)
        assert rows.was_read(place, length).tobytes() == expected.tobytes()
    rows.close()


def test_cupys_events_are_waited_for_and_its_memory_is_given_back():
    rows = DeviceRows(CupyLibrary(cupy_stand_in), 2, 8, 2)
    assert rows.store([1], [8]) == 0.001 == rows.read([1])
    assert rows.store([], []) == 0
    rows.close()
    assert cupy_stand_in.released


def found_with(*installed: str) -> Library | NoDevice:
    """CuPy and torch as they are here, of which only those are installed."""

    def import_module(name: str) -> object:
        if name not in installed:
            raise ImportError(name)
        return cupy_stand_in if name == "cupy" else torch

    return device_library.find(import_module=import_module)  # type: ignore[arg-type]


def test_cupy_is_taken_before_torch_and_torch_where_cupy_has_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    assert isinstance(found_with("cupy", "torch"), CupyLibrary)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: None)
    assert isinstance(found_with("cupy", "torch"), CupyLibrary)
    assert isinstance(found_with("torch"), TorchLibrary)

    def no_driver() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: too old\nsecond line")

    monkeypatch.setattr(cupy_stand_in.cuda.runtime, "getDeviceCount", no_driver)
    assert isinstance(found_with("cupy", "torch"), TorchLibrary)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = "cupy: RuntimeError: cudaErrorInsufficientDriver: too old; torch finds no GPU"
    assert found_with("cupy", "torch") == NoDevice(reason)
    monkeypatch.setattr(cupy_stand_in.cuda.runtime, "getDeviceCount", lambda: 0)
    assert found_with("cupy") == NoDevice("cupy finds no GPU; torch is not installed")


@pytest.mark.parametrize(("where", "window"), [("emulated", 1), ("memory", 1), ("disk", 3)])
def test_a_gap_on_the_device_is_filled_from_below_and_nothing_behind_it_comes_from_the_device(
    where: str, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gpu_tier, "WINDOW_BYTES", window * row_bytes_for(BLOCK))

    async def check(tier: GpuTier) -> None:
        for number in (1, 2, 3):
            await tier.write(blocks(number))
        await tier.read(blocks(1))
        await tier.read(blocks(3))
        await tier.write(blocks(4))  # takes the row of 2
        tier.take_behind()
        read = await tier.read(blocks(1, 2, 3))
        assert read.blocks == 3
        assert [part.blocks for part in read.parts] == [1, 2]
        assert read.parts[0].tier == "gpu" != read.parts[1].tier
        landed = [behind.part for behind in tier.take_behind() if behind.part.tier == "gpu"]
        assert [part.blocks for part in landed] == [1], "3 is still in its row"
        again = await tier.read(blocks(1, 2, 3))
        assert by_tier(again.parts) == {"gpu": 3}
        counters = await tier.counters()
        assert (counters["gpu_promoted"], counters["gpu_evicted"]) == (1, 2)

    with gpu(where, 3, tmp_path) as tier:
        asyncio.run(check(tier))


def test_with_nothing_below_a_gap_ends_what_is_found_and_no_more_than_the_rows_is_kept():
    async def check(tier: GpuTier) -> None:
        done = await tier.write(blocks(*range(1, 6)))
        assert (done.created, done.existed, done.declined) == (3, 0, 2)
        assert by_tier(done.parts) == {"gpu": 3} and not tier.take_behind()
        assert (await tier.read(blocks(*range(1, 6)))).blocks == 3, "its beginning, not its end"
        await tier.write(blocks(9))
        assert (await tier.read(blocks(*range(1, 6)))).blocks == 2
        await tier.write(blocks(11, 12, 13))
        await tier.write(blocks(14))
        assert (await tier.read(blocks(11, 12, 13))).blocks == 2

    with above(NoTier(), 3) as tier:
        asyncio.run(check(tier))


def test_a_block_that_is_wrong_on_the_device_is_noticed_and_read_from_below():
    class WrongOnce(Payload):
        num_wrong = 1

        def fill(self, view: memoryview, key: bytes) -> None:
            super().fill(view, key)
            if key == blocks(2).keys[0] and self.num_wrong:
                self.num_wrong -= 1
                view[-1] ^= 1

    async def check(tier: GpuTier) -> None:
        await tier.write(blocks(1, 2, 3))
        read = await tier.read(blocks(1, 2, 3))
        assert by_tier(read.parts) == {"gpu": 1, "emulated": 2} and read.blocks == 3
        assert by_tier((await tier.read(blocks(1, 2, 3))).parts) == {"gpu": 3}
        assert (await tier.counters())["gpu_damaged"] == 1
        on_device = (await tier.occupancy())["gpu"]
        assert (on_device.used_bytes, on_device.blocks) == (3 * tier.row_bytes, 3)

    with above(EmulatedBackend(1e12), 8, WrongOnce(1, BLOCK, noise_bytes=MiB)) as tier:
        asyncio.run(check(tier))


@pytest.mark.parametrize("where", ["alone", "emulated", "disk"])
def test_after_many_at_once_every_row_and_every_block_is_accounted_for(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # So small that others come between the windows of one prompt.
    monkeypatch.setattr(gpu_tier, "WINDOW_BYTES", 3 * row_bytes_for(BLOCK))
    moved: list[tuple[str, Part]] = []
    draw = random.Random(3)

    async def user(tier: GpuTier) -> None:
        for _ in range(12):
            start = draw.randrange(60)
            prompt = blocks(*range(start, start + draw.randrange(1, 9)))
            read = await tier.read(prompt)
            moved.extend(("read", part) for part in read.parts)
            new = prompt.part(read.blocks) if draw.random() < 0.7 else prompt
            written = await tier.write(new)
            assert written.created + written.existed + written.declined == len(new.keys)
            moved.extend(("write", part) for part in written.parts)

    async def everybody(tier: GpuTier) -> dict[str, int]:
        await asyncio.gather(*(user(tier) for _ in range(20)))
        await tier.settle()
        moved.extend(("write", behind.part) for behind in tier.take_behind())
        return dict(await tier.counters())

    with gpu(where, 17, tmp_path) as tier:
        counters = asyncio.run(everybody(tier))
        assert counters["gpu_evicted"] and counters["gpu_hits"]
        assert all(books(tier, counters, moved).values())
        for name in ("gpu_hits", "gpu_written", "gpu_promoted", "gpu_evicted", "gpu_damaged"):
            wrong = {**counters, name: counters[name] + 1}
            assert not all(books(tier, wrong, moved).values()), name


def options(**settings: object) -> Options:
    given = {
        "model": "tiny-1b", "num_users": 4, "duration": 60, "max_requests": 6, "seed": 5,
        "generation_mode": "none", "bytes_scale": 1 / 64, "think_scale": 0.0, "block_tokens": 64,
        "gpu_mem_gb": 1 / 512, "cpu_mem_gb": 1 / 16, "storage_capacity_gb": 1 / 4,
    }  # fmt: skip
    return Options(**{**given, **settings})  # type: ignore[arg-type]


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_library, "find", lambda: ON_CPU)
    monkeypatch.setattr(run, "HEADROOM_S", 0.01)


@pytest.mark.parametrize(
    ("settings", "tiers"),
    [({"cpu_mem_gb": 0, "no_disk": True}, ["gpu"]), ({}, ["gpu", "memory", "disk"])],
)
def test_a_run_with_a_gpu_tier_has_books_that_agree_and_reads_from_the_device(
    settings: dict[str, object], tiers: list[str], with_gpu: None, tmp_path: Path
):
    found = run.execute(options(cache_dir=tmp_path, **settings)).document()
    assert found["tiers"] == tiers
    assert found["accounting"] and all(line["agrees"] for line in found["accounting"])
    assert {line["tier"] for line in found["accounting"]} >= {*tiers}
    stats = found["summary"]["cache_stats"]
    assert stats["read_share_by_tier"]["gpu"] > 0 and stats["gpu_entries"] > 0
    assert abs(sum(stats["read_share_by_tier"].values()) - 1) < 1e-9
    assert found["counters"]["gpu_evicted"] > 0
    assert found["summary"]["tier_latency_ms"].keys() >= {"gpu_read", "gpu_write"}
    assert report.render(found).count("Entries") == 3


def test_without_a_gpu_the_size_is_as_0_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(device_library, "find", lambda: NoDevice("cupy is not installed"))
    monkeypatch.setattr(run, "HEADROOM_S", 0.01)
    found = run.execute(options(cache_dir=tmp_path, no_disk=True, max_requests=1))
    note = "GPU tier SKIPPED: cupy is not installed; no GPU here, --gpu-mem-gb is as 0"
    assert found.tiers == ("memory",) and note in found.notes
    nowhere = "cpu_mem_gb: 0 with no_disk leaves nowhere to store anything"
    with pytest.raises(ConfigError, match=nowhere):
        run.execute(options(no_disk=True, cpu_mem_gb=0))
    with pytest.raises(ConfigError, match=nowhere):
        options(no_disk=True, cpu_mem_gb=0, gpu_mem_gb=0)


def test_more_than_is_free_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="gpu_mem_gb: "):
        GpuTier(NoTier(), BLOCK, 1 << 50, PAYLOAD, ON_CPU)
    for library in (CupyLibrary(cupy_stand_in), TorchLibrary(torch, "cpu")):
        monkeypatch.setattr(library, "is_gpu", True)
        monkeypatch.setattr(library, "free_bytes", lambda: 3 * MiB)
        with pytest.raises(ConfigError, match=r"gpu_mem_gb: .* only 3\.0 MiB is free \(.* on c"):
            GpuTier(NoTier(), BLOCK, 4 * MiB, PAYLOAD, library)
    with pytest.raises(ConfigError, match="gpu_mem_gb: 100 bytes are too few"):
        GpuTier(NoTier(), BLOCK, 100, PAYLOAD, ON_CPU)
