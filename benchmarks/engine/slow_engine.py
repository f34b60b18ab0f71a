"""`vllm serve` with a minimum step length that the caller sets while the engine runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.engine import VllmServer
from examples.processes import REPOSITORY

WORKER = "benchmarks.engine.slow_worker.SlowWorker"


class SlowEngine(VllmServer):
    """Its steps run at full speed until `stretch` is called."""

    start_timeout_s = 600.0  # several engines start in parallel

    def __init__(
        self,
        model: Path | str,
        *,
        connector: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        # vLLM imports the worker's class by name, and `vllm` is a script of another folder.
        found = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        super().__init__(
            model,
            connector=connector,
            env={"PYTHONPATH": os.pathsep.join(found)},
            args=["--worker-cls", WORKER, *args],
            log=log,
        )

    def stretch(self, step_ms: float) -> None:
        """From now on a step that computes takes at least `step_ms`; 0 is full speed."""
        body = {"method": "stretch_steps", "args": [f"{step_ms:g}"]}
        with self._request("POST", "/collective_rpc", body) as response:
            response.read()
