"""An engine whose settings keep it from the blocks of another logs it, once."""

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from scripted_client import Engine

from remote_server.errors import DeadlineExceeded
from remote_server.protocol import NamespaceStats, TierShare


@pytest.fixture
def said() -> Any:
    """The warnings of the tier, as they are logged."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kvferry.remote_tier")
    logger.addHandler(handler)
    yield lambda: [record.getMessage() for record in records]
    logger.removeHandler(handler)


def stored_by_another(**facts: str) -> SimpleNamespace:
    other = NamespaceStats(
        block_bytes=4000, tiers={"memory": TierShare(blocks=7)}, client="older", fingerprint=facts
    )
    return SimpleNamespace(namespaces={"model@old": other})


def test_only_a_field_that_differs_is_named_when_the_server_first_answers(said: Any):
    for model, lines in {
        "m": [],
        "another": [
            "engine cannot use the blocks of model@old (7 blocks): model is m here and another "
            "there"
        ],
    }.items():
        engine = Engine()
        engine.tier.serve_external_requests(MagicMock())
        engine.client.stats_asked[-1].set_result(stored_by_another(model=model))
        assert said() == lines


def test_it_is_asked_once_a_boot_of_the_server_and_never_in_between(said: Any):
    engine = Engine()
    for _ in range(5):
        engine.tier.serve_external_requests(MagicMock())
    assert len(engine.client.stats_asked) == 1
    engine.client.epoch = "boot-2"
    engine.tier.serve_external_requests(MagicMock())
    assert len(engine.client.stats_asked) == 2


def test_a_server_that_does_not_answer_the_question_is_no_news(said: Any):
    engine = Engine()
    engine.tier.serve_external_requests(MagicMock())
    engine.client.stats_asked[-1].set_exception(DeadlineExceeded("late"))
    assert said() == []
