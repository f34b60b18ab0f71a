"""What the benchmark of hooks and client makes of its measurements. No engine is started here."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.record import Record
from benchmarks.harness.runner import Sample, WrongBytes
from benchmarks.remote_kv_cache.baseline.steps import background_client, step_results
from benchmarks.remote_kv_cache.baseline.steps.background_client import BackgroundClient, Moved
from benchmarks.remote_kv_cache.baseline.steps.hook_timer import HookTimer, cost_of_timing
from benchmarks.remote_kv_cache.baseline.steps.step_results import IDLE, Trial
from benchmarks.remote_kv_cache.baseline.steps.stepped_engine import Step
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import connect
from benchmarks.remote_kv_cache.work.results import Variant
from examples.processes import RemoteServer

pytestmark = pytest.mark.real_time

FULL = Variant("full speed", "tcp")


class Clock:
    """Nanoseconds that pass only when a test moves them."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


class Tier:
    def __init__(self, wall: Clock, cpu: Clock) -> None:
        self.wall, self.cpu = wall, cpu

    def spend(self, seconds: int, waiting: int = 0) -> None:
        self.wall.now += (seconds + waiting) * 10**9
        self.cpu.now += seconds * 10**9

    def lookup(self, key: int) -> int:
        self.spend(2, waiting=1)
        return key

    def submit(self) -> None:
        self.spend(4)
        raise ConnectionError


class Connector(Tier):
    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.wall, tier.cpu)
        self.tier = tier

    def build(self) -> int:
        self.spend(10)
        return self.tier.lookup(1) + self.tier.lookup(2)


@pytest.fixture
def timed() -> tuple[HookTimer, Connector]:
    wall, cpu = Clock(), Clock()
    timer, tier = HookTimer(wall, cpu), Tier(wall, cpu)
    connector = Connector(tier)
    timer.wrap(connector, ["build", "no_such_hook"], "vllm")
    timer.wrap(tier, ["lookup", "submit"], "ours")
    return timer, connector


def test_nested_calls_are_charged_to_their_own_owner(timed: tuple[HookTimer, Connector]):
    timer, connector = timed
    assert connector.build() == 3
    spent = timer.take()
    assert spent.by_owner == {"vllm": 10, "ours": 6}
    assert spent.waiting == 2
    assert timer.take().by_owner == {"vllm": 0, "ours": 0}


def test_a_hook_that_raises_is_timed_and_still_raises(timed: tuple[HookTimer, Connector]):
    timer, connector = timed
    with pytest.raises(ConnectionError):
        connector.tier.submit()
    connector.build()
    spent = timer.take()
    assert spent.by_owner == {"vllm": 10, "ours": 10}
    assert spent.waiting == 2
    assert 0 <= cost_of_timing(100) < 1e-3


def trials(count: int, ours_ms: float, step_ms: float = 10) -> list[Trial]:
    """100 steps each, a tick apart so that no two are equal; the last two of them are ten times."""
    return [
        Trial([
            Step(factor * (step_ms + tick / 100) / 1e3, factor * ours_ms / 1e3, 2e-4, 1e-4)
            for factor in [*[1] * 98, *[10] * 2]
        ])
        for tick in range(count)
    ]  # fmt: skip


def record_of(**parts: list[Trial]) -> Record:
    record = Record("b", "c")
    for variant, measured in ((IDLE, parts["idle"]), (FULL, parts["full"])):
        sample = Sample([1.0] * len(measured))
        record.rows += step_results.rows_of("small", variant, sample, measured)
        record.figures += step_results.figures_of(variant, sample, measured)
    return record


def test_rows_hold_one_percentile_per_trial_and_figures_those_of_all_steps(tmp_path: Path):
    full = trials(5, ours_ms=0.05)
    full[0].background = Moved(300 << 20, 2.0)
    record = record_of(idle=trials(5, ours_ms=0.04), full=full)
    rows = {row.operation: row for row in record.rows}
    assert len(rows) == 12
    row = rows["full speed: our hooks, p99"]
    assert (row.transport, row.num_bytes) == ("tcp", 0)
    assert row.sample.values == pytest.approx([0.0005] * 5)
    assert rows["idle client: engine step, median"].seconds == pytest.approx(0.01002)
    figures = {figure.name: figure.values for figure in record.figures}
    ours = figures["full speed: our hooks"]
    assert ours == pytest.approx({"median": 0.05, "p99": 0.5, "max": 0.5, "steps under 1 ms": 1.0})
    assert full[0].bytes_per_s == pytest.approx(150 << 20)
    record.write(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["model"] == "small"


def test_the_table_judges_steps_against_an_idle_client_and_hooks_against_the_goal():
    text = step_results.describe(
        record_of(idle=trials(5, ours_ms=0.04), full=trials(5, ours_ms=0.2, step_ms=15))
    )
    assert "1.50x slower" in text
    assert "our hooks under 1 ms a step (p99), full speed, tcp: 2.00 ms, NOT met" in text
    same = record_of(idle=trials(5, ours_ms=0.04), full=trials(5, ours_ms=0.09))
    assert "not significant" in step_results.describe(same)
    assert "0.90 ms, met" in step_results.describe(same)
    assert "<svg" in step_results.chart(same).svg()


@pytest.mark.parametrize("bytes_per_s", [None, 200 << 20])
def test_the_background_client_moves_blocks_until_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float | None
):
    size = 4096
    monkeypatch.setattr(background_client, "BLOCK_BYTES", size)
    source, target = blocks.shared_pools(background_client.NUM_BLOCKS, size)
    blocks.fill(source.pool)
    with RemoteServer("64MiB") as server:
        client = connect(server.endpoint, background_client.NAMESPACE, size)
        background = BackgroundClient(client, source, target)
        assert background.stop() == Moved(0, 0.0)
        background.start(bytes_per_s)
        first = background.stop()
        assert first.num_bytes >= 2 * size
        background.start(bytes_per_s)
        source.pool[0, :8] ^= 1
        with pytest.raises(WrongBytes):
            background.stop()
        background.close()
        client.close()
    source.close()
    target.close()
