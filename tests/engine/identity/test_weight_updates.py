"""A real engine whose weights change while it runs: it never uses or stores a block of others."""

from pathlib import Path
from typing import Any

import pytest
from cluster import BLOCK, ENGINE_ARGS, PATIENT, Cluster, Engine, connector

from examples.tiny_model import prompt_tokens

PROMPT = prompt_tokens(640 + 3, seed=970)
WHOLE = 640 // BLOCK * BLOCK
NOTHING = {"engine": 0, "pool": 0, "server": 0}


class Updated(Engine):
    def do(self, path: str, body: Any = None) -> None:
        with self._request("POST", path, body, timeout_s=120):
            pass

    def scale_norms(self, factor: float) -> None:
        self.do("/collective_rpc", {"method": "scale_norms", "args": [str(factor)]})

    def changes(self) -> float:
        """Changes of the weights that no reset announced, so far."""
        return self.metric("kvferry_weight_changes_total")


def with_other_weights(model: Path, folder: Path) -> Path:
    from safetensors.torch import load_file, save_file  # seconds of torch, for one test

    folder.mkdir()
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            halved = {name: one / 2 if one.dim() == 1 else one for name, one in tensors.items()}
            save_file(halved, folder / file.name, metadata={"format": "pt"})
        else:
            (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.whole
def test_weights_that_sleep_change_are_loaded_and_come_back(
    cluster: Cluster, model: Path, logs: Path, tmp_path: Path
):
    here = Path(__file__)
    env = {"PYTHONPATH": f"{here.parent}:{here.resolve().parents[3]}"}
    args = [*ENGINE_ARGS, "--worker-extension-cls", "weight_changes.WeightChanges"]
    ours, log = connector(cluster.server.endpoint, **PATIENT), logs / "weights.log"
    with Updated(model, connector=ours, args=args, env=env, log=log) as engine:
        engine.when_ready()
        cold = engine.ask(PROMPT)
        engine.settle()

        # Sleep resets the connector. The weights are the same.
        engine.do("/sleep?level=1")
        engine.do("/wake_up")
        answer, tokens = engine.ask_from(PROMPT)
        assert tokens == {**NOTHING, "server": WHOLE} and answer.agrees_with(cold)

        # In place, and not reported. vLLM's default reset empties its own cache, and the pool has
        # the prompt of the old weights.
        engine.scale_norms(0.5)
        engine.reset_prefix_cache(timeout_s=30)
        other, tokens = engine.ask_from(PROMPT)
        assert tokens == NOTHING and engine.changes() == 1
        assert not other.agrees_with(cold), "the weights do not matter to this prompt"
        engine.settle()

        # Taken back: the blocks of the start are found on the server under their old name.
        engine.scale_norms(2)
        engine.reset_prefix_cache(timeout_s=30)
        answer, tokens = engine.ask_from(PROMPT)
        assert tokens == {**NOTHING, "server": WHOLE} and answer.agrees_with(cold)
        assert engine.changes() == 2

        # The same other weights from files: their blocks are found, too.
        path = str(with_other_weights(model, tmp_path / "other"))
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        engine.do("/collective_rpc", rpc)
        engine.reset_prefix_cache(timeout_s=30)
        answer, tokens = engine.ask_from(PROMPT)
        assert tokens == {**NOTHING, "server": WHOLE} and answer.agrees_with(other)

        # A reset that includes the connector begins an epoch before any sample.
        engine.scale_norms(2)
        engine.reset_prefix_cache(timeout_s=30, external=True)
        answer, tokens = engine.ask_from(PROMPT)
        assert tokens == {**NOTHING, "server": WHOLE} and answer.agrees_with(cold)
        assert engine.changes() == 3
        assert engine.metric("kvferry_hook_errors_total") == 0
