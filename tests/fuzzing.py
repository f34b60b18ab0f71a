"""How long the property tests run: a brief, repeatable selection, or minutes of new examples.

A test takes the fixture `fuzz` and hands it a hypothesis test or a state machine. In an ordinary
run that is a fixed number of fixed examples. With KVFERRY_FUZZ_MINUTES set, which `make fuzz`
does, the tests share that time and draw new examples until it is over. What failed is kept in
`.cache/fuzz` and tried first by the next such run.

Test modules name this file in `pytest_plugins`.
"""

import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from remote_server.guard import Guard
from remote_server.store import io_threads as pool

MINUTES = os.environ.get("KVFERRY_FUZZ_MINUTES")

FOUND = Path(__file__).resolve().parents[1] / ".cache" / "fuzz"

ROUND = 100
"""Examples between two looks at the clock."""

_counts: dict[str, int] = {}
_kinds: dict[str, str] = {}
"""By test, the kind of its inputs: `store` of `test_fuzz_store.py`."""
_failed: list[str] = []


class Fuzz:
    """One property test's share of the time."""

    def __init__(self, name: str, seconds: float | None) -> None:
        self._name = name
        self._seconds = seconds

    @property
    def seconds(self) -> float | None:
        """For a test that draws examples by itself; None in an ordinary run."""
        return self._seconds

    def run(self, test: Callable[[], None], examples: int) -> None:
        """`test` was made by `given`. `examples` are those of an ordinary run."""
        counted = test.hypothesis.inner_test  # type: ignore[attr-defined]

        @wraps(counted)  # by its source the examples that failed are found again
        def inner(*args: object, **kwargs: object) -> None:
            self._count()
            counted(*args, **kwargs)

        test.hypothesis.inner_test = inner  # type: ignore[attr-defined]
        self._repeat(self._settings(examples)(test))

    def machine(self, kind: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
        """The same for a state machine, of at most `steps` steps an example."""

        def make() -> RuleBasedStateMachine:
            self._count()
            return kind()

        how = settings(self._settings(examples), stateful_step_count=steps)
        self._repeat(lambda: run_state_machine_as_test(make, settings=how))

    def _count(self) -> None:
        _counts[self._name] = _counts.get(self._name, 0) + 1

    def _settings(self, examples: int) -> settings:
        common = settings(
            deadline=None, print_blob=True, suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        )  # fmt: skip
        if self._seconds is None:
            return settings(common, max_examples=examples, derandomize=True, database=None)
        found = DirectoryBasedExampleDatabase(FOUND)
        return settings(common, max_examples=ROUND, database=found)

    def _repeat(self, once: Callable[[], None]) -> None:
        ends_at = time.monotonic() + (self._seconds or 0.0)
        once()
        while time.monotonic() < ends_at:
            once()


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    _kinds[request.node.name] = request.path.stem.removeprefix("test_fuzz_")
    return Fuzz(request.node.name, request.node.fuzz_seconds)


@pytest.fixture
def internal_errors(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every exception that a loop or an I/O thread logs, to go on with the next job: a defect."""
    found: list[object] = []
    monkeypatch.setattr(Guard, "_failed", lambda _, part, error: found.append((part, error)))
    monkeypatch.setattr(Guard, "request_failed", lambda _, error: found.append(error))
    monkeypatch.setattr(pool.log, "exception", lambda *_: found.append(sys.exc_info()[1]))
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    theirs = [item for item in items if "fuzz" in getattr(item, "fixturenames", ())]
    for item in theirs:
        seconds = None if MINUTES is None else 60 * float(MINUTES) / len(theirs)
        item.fuzz_seconds = seconds  # type: ignore[attr-defined]
        # One that fails takes up to five minutes to find its smallest example.
        item.add_marker(pytest.mark.timeout(400 + 2 * (seconds or 0)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.rpartition("::")[2]
    if report.failed and name in _counts:
        _failed.append(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if MINUTES is None:
        return
    terminalreporter.section("examples run")
    for name, count in sorted(_counts.items()):
        terminalreporter.write_line(f"{count:9,}  {name}")
    terminalreporter.write_line("")
    for kind in sorted({*_kinds.values()}):
        count = sum(_counts[name] for name in _counts if _kinds[name] == kind)
        terminalreporter.write_line(f"{count:9,}  {kind}")
    terminalreporter.write_line(f"{sum(_counts.values()):9,}  in all")
    for name in _failed:
        words = " and ".join(name.rstrip("]").split("["))
        terminalreporter.write_line(
            f"replay what failed, from {FOUND}: make fuzz MINUTES=0 ARGS=\"-k '{words}'\""
        )
