"""Repeated runs of tests that depend on the host, and the list of those that needed one.

A test marked `real_time` runs processes, sockets or engines against a clock. When it fails, it
runs again, at most twice, and alone: no other worker runs a test meanwhile. A third failure is a
failure, and so is the first failure of a test without the mark. A test that passed only when
repeated is flaky: the last lines of the run name it with its first failure and the seed, and
`.cache/tests/flaky.json` has each failure in full.
"""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from _pytest.terminal import TerminalReporter

FLAKY_JSON = Path(".cache", "tests", "flaky.json")
"""Below the root of the repository. Each run writes it anew."""

MARK = "real_time"
REPEATS = 2


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FlakyTests(config), "flaky-tests")
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(Turns(worker["testrunuid"]), "turns")


@pytest.hookimpl(trylast=True)  # other files' hooks add the mark to whole folders
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker(MARK) is not None:
            item.add_marker(pytest.mark.flaky(reruns=REPEATS))


class Turns:
    """Turns of the workers of one run: tests run beside each other, a repeated one alone."""

    def __init__(self, run: str) -> None:
        folder = Path(tempfile.gettempdir())
        self._names = [folder / f"kvferry-tests-{run}.{name}" for name in ("next", "running")]
        self._next, self._running = (name.open("wb") for name in self._names)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        is_repeated = getattr(item, "execution_count", 1) > 1
        # A repeated test waits here with `next` in its hands, so that no other test begins.
        with _locked(self._next):
            fcntl.flock(self._running, fcntl.LOCK_EX if is_repeated else fcntl.LOCK_SH)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            fcntl.flock(self._running, fcntl.LOCK_UN)

    def pytest_unconfigure(self) -> None:
        self._next.close()
        self._running.close()
        for name in self._names:
            name.unlink(missing_ok=True)


@contextmanager
def _locked(file: IO[bytes]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class FlakyTests:
    """What failed and passed when repeated, gathered from the reports of all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._seed = config.getoption("--seed")
        self._json = config.rootpath / FLAKY_JSON
        self._failures: dict[str, list[str]] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun":
            self._failures.setdefault(report.nodeid, []).append(report.longreprtext)
        elif report.failed:
            self._failed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> None:
        flaky = {name: texts for name, texts in self._failures.items() if name not in self._failed}
        rows = [
            {"test": name, "seed": self._seed, "failures": texts} for name, texts in flaky.items()
        ]
        _write(self._json, json.dumps(rows, indent=1))
        terminalreporter.write_line(f"flaky: {len(flaky)}", yellow=bool(flaky))
        for name, texts in flaky.items():
            terminalreporter.write_line(
                f"  {name} (seed {self._seed}, failed {len(texts)} of {len(texts) + 1}): "
                f"{_gist(texts[0])}"
            )
        for name in self._failed & self._failures.keys():
            # What the report has of it is the last failure, which may follow from the first.
            terminalreporter.write_line(f"  {name} failed first: {_gist(self._failures[name][0])}")


def _write(path: Path, text: str) -> None:
    with suppress(OSError):  # this user may not write to the checkout
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text + "\n")
        unfinished.replace(path)


def _gist(text: str) -> str:
    """The line of a failure's text that names the error."""
    lines = text.splitlines()
    errors = [line for line in lines if line.startswith("E ")] or lines[-1:] or ["no text"]
    return errors[0].removeprefix("E ").strip()
