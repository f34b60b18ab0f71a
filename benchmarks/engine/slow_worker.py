"""A CPU worker whose steps take at least a given time, as those of a large model do.

vLLM imports this module in its worker process (`--worker-cls`); nothing else imports it, because it
needs vLLM. `slow_engine` starts engines with it.
"""

import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

STEP_MS = "BENCH_STEP_MS"
"""Environment variable: the minimum milliseconds of a step. Unset or 0: full speed."""


class SlowWorker(CPUWorker):  # type: ignore[misc]  # mypy reads vLLM's classes as Any
    """A `CPUWorker` that sleeps at the end of a step that was faster than the given time.

    Steps without tokens only move blocks and are not stretched: a large model computes nothing in
    them either. The sleep follows the model and the start of the step's loads, so copies and
    transfers continue during it, as they do beside a model on a GPU.
    """

    _step_s = float(os.environ.get(STEP_MS) or 0) / 1000

    def execute_model(self, scheduler_output: Any) -> Any:
        ends_s = time.monotonic() + self._step_s
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            time.sleep(max(0.0, ends_s - time.monotonic()))
        return output

    def stretch_steps(self, milliseconds: str) -> None:
        """From now on a step takes at least this long. Text, as `/collective_rpc` passes it."""
        self._step_s = float(milliseconds) / 1000
