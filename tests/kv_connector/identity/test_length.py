"""The longest sequence that an engine takes keeps engines apart only where it changes values."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kv_connector.identity.model_facts import LENGTH_FREE_MODELS, LENGTH_FREE_ROPE

EXTRA = {
    "linear": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 2.0},
    "deepseek_yarn": {"factor": 2.0},
}
ORIGINAL = {"original_max_position_embeddings": 512}


def angles(kind: str, max_position: int) -> torch.Tensor:
    parameters = {"rope_theta": 10_000.0, "rope_type": kind, **ORIGINAL, **EXTRA.get(kind, {})}
    with set_current_vllm_config(VllmConfig()):
        rotary = get_rope(64, max_position, True, parameters, torch.float32)
    return rotary.cos_sin_cache[:256]


@pytest.mark.parametrize("kind", sorted(LENGTH_FREE_ROPE))
def test_the_kinds_of_rope_that_are_free_of_length_have_equal_angles(kind: str):
    assert torch.equal(angles(kind, 1024), angles(kind, 2048))


# Modules of vLLM's models that hold no arithmetic of a decoder.
PLUMBING = {"interfaces", "interfaces_base", "utils", "adapters", "vision", "module_mapping"}
IN_MODULE = {"gemma3_text": "gemma3"}


def sources(module: str, seen: dict[str, str]) -> dict[str, str]:
    """The code of a model and of the models that it is made of."""
    if module in seen or module in PLUMBING:
        return seen
    spec = find_spec(f"vllm.model_executor.models.{module}")
    assert spec is not None and spec.origin is not None, module
    seen[module] = Path(spec.origin).read_text()
    for name in re.findall(r"^\s*from \.(\w+) import", seen[module], re.MULTILINE):
        sources(name, seen)
    return seen


def test_the_models_that_are_free_of_length_do_not_look_at_it():
    for model in sorted(LENGTH_FREE_MODELS):
        for module, code in sources(IN_MODULE.get(model, model), {}).items():
            assert "max_model_len" not in code, f"{model}: {module}"
    assert "max_model_len" in sources("llama4", {})["llama4"]
