"""A worker extension that changes weights in place, as a trainer's would."""

from typing import Any


class WeightChanges:
    """Becomes a base of vLLM's worker: `--worker-extension-cls weight_changes.WeightChanges`."""

    model_runner: Any

    def scale_norms(self, factor: str) -> None:
        """Multiply every parameter of one dimension, in place."""
        for parameter in self.model_runner.get_model().parameters():
            if parameter.dim() == 1:
                parameter.data.mul_(float(factor))
