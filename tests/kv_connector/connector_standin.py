"""A connector without an engine: vLLM's half is a stand-in, ours is real."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from scripted_client import Engine
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kv_connector.connector import KVFerryConnector
from kv_connector.hooks.introduction import Introduction
from kv_connector.hooks.prefills import Prefills
from kv_connector.hooks.resets import Resets
from kv_connector.hooks.traffic import Traffic
from kv_connector.identity.self_test import Outcome, Report
from kv_connector.identity.worker_reports import (
    FerryWorkerMetadata,
    Reporter,
    Reports,
    WorkerReport,
    with_received,
)

NOTHING = OffloadingConnectorMetadata({}, {}, set())


def output_of(*reports: WorkerReport) -> KVConnectorOutput:
    """What the scheduler gets of a step in which these workers reported."""
    metadata = FerryWorkerMetadata(reports={report.rank: report for report in reports})
    return KVConnectorOutput(kv_connector_worker_meta=metadata)


class Connector:
    """Scheduler and worker 0 of two in one, with a tier whose client a test answers for."""

    def __init__(self) -> None:
        self.engine = Engine()
        made = object.__new__(KVFerryConnector)
        made.connector_scheduler = MagicMock()
        made.connector_scheduler.get_num_new_matched_tokens.return_value = (5, True)
        made.connector_scheduler.get_external_cache_hit_sources.return_value = {}
        made.connector_scheduler._req_status.__getitem__.return_value = SimpleNamespace(
            num_locally_computed_tokens=10, load_key_ranges=[(10, 12, b"key")], group_states=[]
        )
        made.connector_worker = MagicMock()
        made.connector_worker.spec.pool_file = None
        made._engine_config = MagicMock()
        made._engine_cache, made._block_pool = MagicMock(), None
        made._bounding_group_ids = ()
        made._config = SimpleNamespace(server="tcp://127.0.0.1:1", namespace="mine")  # type: ignore[assignment]
        made._traffic = Traffic(1e-9)
        made._prefills = Prefills()
        made._remote = self.engine.tier
        made.connector_scheduler.config.num_workers = 2
        made._resets = Resets(made.scheduler, self.engine.tier)
        made._resets.weights.on_report(WorkerReport(0, facts={}))  # they are not watched
        made._watch, made._sample_request = None, None
        made._reports, made._reporter = Reports(2), Reporter(0)
        made._introduction = Introduction(self.engine.tier, made._reports, "m", {}, [])
        made.connector_scheduler.build_connector_meta.side_effect = lambda _: NOTHING
        made.connector_worker.build_connector_worker_meta.side_effect = lambda: None
        self.connector = made
        told = WorkerReport(0, 1, {"attention": "x"}, Report(Outcome.PASSED))
        self.examples: dict[str, Any] = {
            "request": MagicMock(kv_transfer_params=None, lora_request=None, num_tokens=100),
            "num_computed_tokens": 10,
            "blocks": MagicMock(),
            "num_external_tokens": 5,
            "scheduler_output": replace(SchedulerOutput.make_empty(), total_num_scheduled_tokens=1),
            "connector_output": output_of(told, replace(told, rank=1)),
            "connector_metadata": with_received(NOTHING, {}),
            "kv_caches": {},
            "metadata": {(0, 0): MagicMock()},
            "gpu_block_pool": MagicMock(),
        }

    def call(self, hook: str) -> Any:
        method = getattr(self.connector, hook)
        wanted = inspect.signature(method).parameters
        unknown = set(wanted) - set(self.examples)
        assert not unknown, f"{hook} takes {unknown}: give an example of it above"
        return method(**{name: self.examples[name] for name in wanted})

    @property
    def errors(self) -> int:
        return sum(self.engine.hook_errors().values())
