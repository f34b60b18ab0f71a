"""Several engines of a benchmark on one GPU: each gets its part, and none starts beside another."""

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from benchmarks.engine import kinds, presets
from benchmarks.engine.driver import EngineSettings
from benchmarks.engine.session import Site, share_of_gpu


def settings(**more: Any) -> EngineSettings:
    return EngineSettings(
        model="m", kv_bytes_per_token=1, max_model_len=64, max_batched_tokens=64, max_num_seqs=1,
        **more,
    )  # fmt: skip


class Starting:
    """An engine that only starts: where `together` is set, with three others at once."""

    most = running = 0
    lock = threading.Lock()
    together: threading.Barrier | None = None

    def __init__(self, own: EngineSettings) -> None:
        self.settings = own

    def start(self) -> None:
        with Starting.lock:
            Starting.running += 1
            Starting.most = max(Starting.most, Starting.running)
        if Starting.together is not None:
            Starting.together.wait(60)
        with Starting.lock:
            Starting.running -= 1

    def stop(self) -> None:
        pass


@pytest.mark.parametrize(("gpus", "share"), [(True, 0.225), (False, None)])
def test_four_engines_share_one_gpu(monkeypatch: pytest.MonkeyPatch, gpus, share):
    Starting.most = 0
    monkeypatch.setattr(Starting, "together", None if gpus else threading.Barrier(4))
    monkeypatch.setattr(presets, "gpu_is_here", lambda: gpus)
    monkeypatch.setattr(kinds, "make", lambda _, own: Starting(own))
    monkeypatch.setattr(Site, "warm", lambda *_: None)
    with ExitStack() as stack:
        site = Site(stack, None, kinds.VLLM, "m")
        made: list[Any] = site.engines([settings() for _ in range(4)])
    assert [each.settings.extra.get("gpu_memory_utilization") for each in made] == [share] * 4
    assert Starting.most == (1 if gpus else 4), "on a GPU one after another"


def test_a_share_that_was_given_is_kept():
    own = settings(extra={"gpu_memory_utilization": 0.5, "seed": 1})
    assert share_of_gpu(own, 4).extra == {"gpu_memory_utilization": 0.5, "seed": 1}
    assert share_of_gpu(settings(), 2).extra == {"gpu_memory_utilization": 0.45}
