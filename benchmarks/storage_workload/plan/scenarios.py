"""The named runs of the source document, option by option."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_QUICK: Mapping[str, Any] = {
    "model": "llama3.1-8b", "num_users": 50, "duration": 120, "gpu_mem_gb": 0, "cpu_mem_gb": 4,
    "generation_mode": "realistic", "seed": 42,
}  # fmt: skip
_SUBMISSION = {**_QUICK, "duration": 600, "performance_profile": "throughput"}

SCENARIOS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "quick": _QUICK,
        "storage-only": {**_QUICK, "duration": 180},
        "production": {
            **_QUICK, "num_users": 100, "duration": 300, "gpu_mem_gb": 16, "cpu_mem_gb": 32,
        },
        "max-users": {
            **_QUICK, "num_users": 20, "duration": 300, "gpu_mem_gb": 16, "cpu_mem_gb": 32,
            "enable_autoscaling": True, "autoscaler_mode": "qos",
        },
        "peak": {
            **_QUICK, "model": "llama3.1-70b-instruct", "num_users": 10, "duration": 180,
            "enable_autoscaling": True, "autoscaler_mode": "capacity", "generation_mode": "none",
        },
        "rag": {
            **_QUICK, "num_users": 30, "duration": 300, "gpu_mem_gb": 16, "cpu_mem_gb": 32,
            "enable_rag": True, "rag_num_docs": 20,
        },
        "submission-8b": {**_SUBMISSION, "num_users": 150},
        "submission-70b": {**_SUBMISSION, "model": "llama3.1-70b-instruct", "num_users": 40},
    }
)  # fmt: skip
