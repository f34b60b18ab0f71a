"""Which methods of ours vLLM calls, which of them may raise, and something to break them with."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kv_connector.connector import KVFerryConnector
from kv_connector.pool.worker import HostWorker
from kv_connector.spec import FerrySpec
from kv_connector.tier.remote_tier import RemoteTier

START = "start-up: an operator must be told of a wrong setting, or of a host it cannot work on"
COPY = "a failed copy between engine and pool would be announced as good bytes"

MAY_RAISE: dict[type, dict[str, str]] = {
    KVFerryConnector: {
        "requires_piecewise_for_cudagraph": START,
        "build_prom_metrics": START,
        "get_required_kvcache_layout": START,
    },
    FerrySpec: {"get_manager": START, "get_worker": START, "create_worker": START},
    HostWorker: {"submit_store": COPY, "submit_load": COPY, "get_finished": COPY},
    RemoteTier: {"build_metric_definitions": START, "config_info_keys": START},
}

BASES: dict[type, tuple[type, ...]] = {
    KVFerryConnector: (KVConnectorBase_V1, SupportsHMA),
    FerrySpec: (OffloadingSpec,),
    HostWorker: (OffloadingWorker,),
    RemoteTier: (SecondaryTierManager,),
}


def hooks_of(ours: type) -> list[str]:
    """What vLLM may call on `ours` and finds our code there, but for what may raise."""
    written_by_us = {
        name
        for one in ours.__mro__
        if one.__module__.startswith("kv_connector")
        for name in vars(one)
    }
    of_vllm = {
        name
        for one in ours.__mro__
        if one.__module__.startswith("vllm")
        for name in vars(one)
        if not name.startswith("_") and callable(getattr(one, name))
    }
    return sorted(written_by_us & of_vllm - set(MAY_RAISE[ours]))


class BrokenOnPurpose(RuntimeError):
    pass


class Broken:
    """Whatever is done with it raises, and is counted."""

    def __init__(self) -> None:
        vars(self)["times"] = 0

    def _raise(self, *_: object, **__: object) -> Any:
        vars(self)["times"] += 1
        raise BrokenOnPurpose

    __getattr__ = __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = _raise
    __contains__ = __bool__ = __enter__ = __add__ = __lt__ = __gt__ = __sub__ = _raise
