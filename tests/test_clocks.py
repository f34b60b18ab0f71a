"""The rule about seconds in tests: what it finds, and what it accepts."""

import runpy
from pathlib import Path

import pytest

CLOCKS = runpy.run_path(str(Path(__file__).parents[1] / ".ci" / "clocks.py"))


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(0.2)",
        "time.sleep(pause)",
        "await asyncio.sleep(1)",
        "assert time.monotonic() - began < 2",
        "took = perf_counter() - began\n    assert took < 0.5",
        "deadline = time.monotonic() + 5",
        "thread.join(5)",
        "event.wait(timeout=10)",
        "future.result(LIMIT_S)",
        "subprocess.run(command, timeout=20)",
    ],
)
def test_a_verdict_by_seconds_is_found(line: str) -> None:
    source = f"LIMIT_S = 3.0\nasync def test_it():\n    {line}\n"
    [(number, function, _)] = CLOCKS["findings_in"](source)
    assert number >= 3 and function == "test_it"


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(0.01)",
        "assert clock.now - began < 2",
        "deadline = time.monotonic() + 60",
        "thread.join(30)",
        "subprocess.run(command, timeout=LIMIT_S)",
        "seen.get(5)",
    ],
)
def test_polls_fake_clocks_and_hang_guards_are_accepted(line: str) -> None:
    source = f"LIMIT_S = 60.0\ndef test_it():\n    {line}\n"
    assert CLOCKS["findings_in"](source) == []
