"""What tests of both packages share.

A helper is in the folder of its tests, or in the lowest folder above all of them that has a
`conftest.py`: pytest puts that folder on the path.
"""

import gc
import os
import sys
from pathlib import Path

import pytest

from examples import tiny_model

pytest_plugins = ["lent", "real_time", "workers"]

# For the servers that tests start as processes, by default: this port is fixed, and a server of the
# machine's user may have it.
os.environ["KVFERRY_ADMIN"] = "off"

# Where the environment has bytecode off, each of several hundred processes would compile all of its
# modules again, which is half of the CPU time of a server's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Until all tests are collected nothing is garbage, and looking for it is a tenth of the time.
gc.disable()

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """For `tests/chaos`; options must be known before the folders below are read."""
    chaos = parser.getgroup("chaos")
    chaos.addoption("--whole", action="store_true", help="all tests, at full length")
    chaos.addoption(
        "--sharing-s",
        type=float,
        default=12.0,
        help="seconds that servers share a bucket for, over each store",
    )
    chaos.addoption("--seed", type=int, default=20, help="what all chance of it comes from")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests in `engine/` need a real engine: they can be left out, and have time to start one.
    What is marked `whole` is left out without `--whole`."""
    engine_folder = str(REPOSITORY / "tests" / "engine")
    for item in items:
        if str(item.path).startswith(engine_folder):
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.real_time)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))  # several start at once
    if config.getoption("--whole"):
        return
    kept, left_out = [], []
    for item in items:
        (kept if item.get_closest_marker("whole") is None else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    """What is imported by now, torch and vLLM among it, is 600,000 objects: a full collection
    would take half a second in each of the hundreds of tests that make one."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def model() -> Path:
    """The small model, built once and kept in `.cache`."""
    return tiny_model.build(REPOSITORY / ".cache" / "models" / "small", "small")
