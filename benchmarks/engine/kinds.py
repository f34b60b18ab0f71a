"""The kinds of engines that `--engine` offers. Every result names its kind."""

from collections.abc import Callable

from benchmarks.engine.driver import Engine, EngineSettings
from benchmarks.engine.vllm_engine import VllmEngine
from benchmarks.harness.record import Record

VLLM, SIMULATED = "vllm", "simulated"


def _vllm(settings: EngineSettings, _: float | None) -> Engine:
    return VllmEngine(settings)


def _simulated(settings: EngineSettings, ratio: float | None) -> Engine:
    from benchmarks.simulated.engine import SimulatedEngine  # imports vLLM, which takes seconds

    return SimulatedEngine(settings, ratio)


KINDS: dict[str, Callable[[EngineSettings, float | None], Engine]] = {
    VLLM: _vllm, SIMULATED: _simulated,
}  # fmt: skip


def named(text: str) -> str:
    """A kind as `--engine` takes it: `vllm`, `simulated`, or `simulated:12` with the ratio of
    computing to fetching for a simulated engine. Raises `ValueError`."""
    name, colon, ratio = text.partition(":")
    if name not in KINDS or (colon and (name != SIMULATED or not float(ratio) > 0)):
        raise ValueError(text)
    return text


def make(kind: str, settings: EngineSettings) -> Engine:
    """An engine of this kind, not started."""
    name, _, ratio = kind.partition(":")
    return KINDS[name](settings, float(ratio) if ratio else None)


def model_of(record: Record) -> str:
    """The model that was run, without the kind of engine; empty for a record without rows."""
    return record.rows[0].model.rpartition(": ")[2] if record.rows else ""


def label(kind: str) -> str:
    """The prefix of every title and model name, so that no simulated figure is taken for one of
    vLLM."""
    return "" if kind == VLLM else f"{kind}{':1' if ':' in kind else ''}: "
