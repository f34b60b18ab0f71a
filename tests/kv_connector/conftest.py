"""Fixtures that several rooms use."""

import logging
from collections.abc import Callable, Iterator

import pytest
from laid_out_worker import make_worker
from modelless_engine import make
from real_connector import hybrid
from scripted_client import Clock, Engine

__all__ = ["hybrid", "make", "make_worker"]


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tracebacks() -> Iterator[Callable[[], int]]:
    """How often something was logged with its traceback."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    ours = logging.getLogger("vllm.kvferry.guard")
    ours.addHandler(handler)
    yield lambda: sum(1 for record in records if record.exc_info)
    ours.removeHandler(handler)
