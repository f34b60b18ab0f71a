"""A pool that CUDA has not page-locked is seen: in a worker's report, a line of log, a gauge."""

from types import SimpleNamespace
from typing import Any

import pytest
from modelless_engine import Make
from vllm.platforms import current_platform

from kv_connector import spec as spec_module
from kv_connector.identity.worker_reports import Reports, WorkerReport
from kv_connector.spec import FerrySpec
from kv_connector.tier import metrics


class Memory:
    """A pool of registered and other parts, as torch shows it."""

    def __init__(self, *parts: bool) -> None:
        self._parts = parts

    def __getitem__(self, part: slice) -> "Memory":
        return Memory(*self._parts[part])

    def is_pinned(self) -> bool:
        (part,) = self._parts
        return part


def worker_with(pool: Memory | None) -> Any:
    return SimpleNamespace(_region=None if pool is None else SimpleNamespace(base_tensor=pool))


def is_locked(worker: Any) -> bool | None:
    of_spec: Any = FerrySpec.is_page_locked
    found: bool | None = of_spec.fget(worker)
    return found


def test_cuda_is_asked_for_both_ends_of_the_pool_and_the_cpu_platform_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    assert current_platform.is_cpu()
    assert is_locked(worker_with(Memory(False))) is None
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    assert is_locked(worker_with(Memory(True, False, True))) is True
    assert is_locked(worker_with(Memory(True, True, False))) is False
    assert is_locked(worker_with(Memory(False, True, True))) is False
    assert is_locked(worker_with(None)) is None


@pytest.mark.parametrize(
    ("workers", "expected"),
    [([], None), ([None, None], None), ([True, True], True), ([True, False], False),
     ([True, None], True)],
)  # fmt: skip
def test_one_worker_whose_pool_is_pageable_makes_it_pageable(workers, expected):
    reports = Reports(len(workers))
    reports.take(WorkerReport(rank, 1, is_page_locked=own) for rank, own in enumerate(workers))
    assert reports.page_locked is expected


@pytest.mark.parametrize("is_page_locked", [False, None])
def test_the_engine_s_gauge_is_what_its_workers_report(
    monkeypatch: pytest.MonkeyPatch, make: Make, is_page_locked: bool | None
):
    lines: list[str] = []
    monkeypatch.setattr(spec_module.logger, "warning", lambda text, *a: lines.append(text % a))
    monkeypatch.setattr(FerrySpec, "is_page_locked", is_page_locked)
    engine = make()
    engine.add("r", list(range(40)))
    engine.step(3)
    stats = engine.connector.get_kv_connector_stats()
    assert stats is not None
    gauges = stats.reduce()
    found = [value for name, value in gauges.items() if metrics.PAGE_LOCKED in name]
    assert found == ([] if is_page_locked is None else [int(is_page_locked)])
    assert len(lines) == (is_page_locked is False)
