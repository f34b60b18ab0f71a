"""For the tests that break what the engine calls."""

import logging
from collections.abc import Callable, Iterator

import pytest


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
