"""Beside a connector that checks its handshake metadata: both start, and each gets its own."""

from typing import Any
from unittest.mock import MagicMock

import pytest
from connector_standin import NOTHING, Connector
from sibling_connector import SiblingConnector, SiblingHandshake, SiblingMetadata
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kv_connector.identity.worker_reports import Reporter, with_received
from kv_connector.request_options import apply_request_options


def beside(ours: Connector, *, first: bool) -> MultiConnector:
    """vLLM's own `MultiConnector` with our connector and a sibling, in either order."""
    sibling: Any = object.__new__(SiblingConnector)
    made = object.__new__(MultiConnector)
    connectors = [ours.connector, sibling]
    made._connectors = connectors if first else connectors[::-1]
    made._extra_async_saves = {}
    return made


@pytest.fixture(params=[True, False], ids=["kvferry-first", "sibling-first"])
def first(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_the_sibling_gets_its_own_handshake_metadata_and_only_that(first: bool):
    """It raises where it is given anything else, and the engine would not start."""
    multi = beside(Connector(), first=first)
    workers = {(pp, tp): multi.get_handshake_metadata() for pp in (0, 1) for tp in (0, 1)}
    assert all(isinstance(metadata, SiblingHandshake) for metadata in workers.values())
    multi.set_xfer_handshake_metadata_pp_aware(workers)


def test_the_reports_of_all_workers_arrive_through_it_and_end_when_heard(first: bool):
    scheduler, workers = Connector(), [Connector(), Connector()]
    for rank, worker in enumerate(workers):
        worker.connector._reporter = Reporter(rank)
        worker.connector._reporter.change(facts={"attention": "x"})
    declared = len(scheduler.engine.client.declared)
    outputs = step(beside(scheduler, first=first), [beside(w, first=first) for w in workers])
    assert outputs == [2, 0], "two reports in the first step, none after they were heard"
    assert len(scheduler.engine.client.declared) == declared + 1


def step(scheduler: MultiConnector, workers: list[MultiConnector]) -> list[int]:
    """Two engine steps as vLLM makes them; how many reports the scheduler got in each."""
    ours = next(c for c in scheduler._connectors if not isinstance(c, SiblingConnector))
    got = []
    for _ in range(2):
        down = MultiKVConnectorMetadata(
            tuple(
                with_received(NOTHING, ours._reports.received) if c is ours else SiblingMetadata()
                for c in scheduler._connectors
            )
        )
        outputs: list[ModelRunnerOutput | None] = []
        for worker in workers:
            worker.bind_connector_metadata(down)
            sent = KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
            outputs.append(ModelRunnerOutput([], {}, kv_connector_output=sent))
        joined = KVOutputAggregator(len(workers)).aggregate(outputs)
        assert joined is not None and joined.kv_connector_output is not None
        output = joined.kv_connector_output
        ours_sent = output.kv_connector_worker_meta.metadata[scheduler._connectors.index(ours)]
        got.append(len(ours_sent.reports) if ours_sent is not None else 0)
        scheduler.update_connector_output(output)
    return got


def test_a_prompt_that_another_connector_brings_is_not_loaded_here_as_well():
    """The request would wait for the server before its transfer could begin."""
    request = MagicMock(kv_transfer_params={"do_remote_prefill": True}, lora_request=None)
    apply_request_options(request)
    assert request.kv_transfer_params == {"do_remote_prefill": True, "max_load_tokens": 0}
