"""The kinds of engines that `--engine` offers. What a kind is called is said in every result."""

from collections.abc import Callable

from benchmarks.engine.driver import Engine, EngineSettings
from benchmarks.engine.vllm_engine import VllmEngine

VLLM = "vllm"

KINDS: dict[str, Callable[[EngineSettings], Engine]] = {VLLM: VllmEngine}


def label(kind: str) -> str:
    """What stands before every title and model name, so that nothing is taken for measured on
    vLLM that was not."""
    return "" if kind == VLLM else f"{kind}: "
