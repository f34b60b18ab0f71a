"""How the tests of a parallel run are spread over its workers, and how many workers there are.

A file's tests run in one worker, in their order, so its fixtures are made once. Files that share
what is costly to make run in one worker, too. So do all tests that start real engines: they share
engines, and two starts at once would take the processor from each other. That worker begins with
them, since they take longest.
"""

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ENGINES = "engines"

WORKERS_AT_MOST = 8
"""Each takes a gigabyte at its peak."""


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, since most tests wait as well as compute."""
    return min(len(os.sched_getaffinity(0)) + 1, WORKERS_AT_MOST)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(trylast=True)  # other files' hooks add the mark to whole folders
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_without_engine)


def _without_engine(item: pytest.Item) -> bool:
    return item.get_closest_marker("engine") is None


TOGETHER = ("tests/deployment/", "tests/benchmarks/storage_workload/")
"""Beginnings of paths: files that share a wheel, and files that share a run of the workload."""


class ByFile(LoadScopeScheduling):
    """One unit of work a file, one for files that belong together, and one for all engines."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if _starts_engines(path):
            return ENGINES
        return next((start for start in TOGETHER if path.startswith(start)), path)


def _starts_engines(path: str) -> bool:
    """By the path alone: the process that schedules has only the names of tests."""
    return path.startswith("tests/engine/") or Path(path).name.startswith("test_engine_")
