"""A session of checks: each in a process of its own, one after another, within a budget of time.

The record is written after each check, so a session that is killed keeps what it has.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_check.checks import Check
from benchmarks.gpu_check.judging import (
    FAILED,
    SKIPPED,
    Verdict,
    install_name,
    kept_of,
    read,
    row_of,
    verdict_of,
)
from benchmarks.harness import machine
from benchmarks.harness.commands import steps
from benchmarks.harness.commands.steps import Ended
from benchmarks.harness.record import Record

MODEL = "checks"
"""`model` of the rows that are the checks themselves."""

RESERVE_S = 10.0
"""Of the budget: to end a check that is cut, and to write the record."""


class Here(NamedTuple):
    """What this machine has."""

    has_gpu: bool
    cores: int
    missing: frozenset[str] = frozenset()
    """Modules that are not installed."""


class Done(NamedTuple):
    """A check and its result."""

    name: str
    verdict: Verdict
    seconds: float
    log: Path | None


Run = Callable[[Sequence[str], Path, float], Ended]


def look(modules: Iterable[str]) -> Here:
    """This machine, and which of the modules it lacks. Imports none of them."""
    missing = {module for module in modules if importlib.util.find_spec(module) is None}
    return Here(machine.num_gpus() > 0, machine.describe()["cores"], frozenset(missing))


@dataclass
class Session:
    """The checks' verdicts, and the record of all."""

    record: Record
    here: Here
    budget_s: float
    logs: Path
    write: Callable[[Record], None]
    run: Run = steps.run
    clock: Callable[[], float] = time.monotonic
    show: Callable[[str], None] = print
    done: list[Done] = field(default_factory=list)

    def check_all(self, checks: Sequence[Check]) -> None:
        """Every check, in order. A KeyboardInterrupt ends the session; the check that it ended and
        those after it have no row."""
        began = self.clock()
        for number, check in enumerate(checks):
            where = f"{number + 1}/{len(checks)} {check.name}"
            now = self.clock()
            left = self.budget_s - RESERVE_S - (now - began)
            verdict, log = self._why_not(check, left), None
            if verdict is None:
                self.show(f"{where}: {now - began:.0f} s of {self.budget_s:.0f} have passed")
                log = self.logs / f"{check.name.replace(' ', '_').replace(chr(39), '')}.log"
                verdict = self._check(check, log, left)
            seconds = self.clock() - now
            self.done.append(Done(check.name, verdict, seconds, log))
            self.record.rows.append(row_of(MODEL, check.name, verdict, seconds))
            self.show(f"{where}: {' '.join(filter(None, verdict))}")
            self.write(self.record)

    def _why_not(self, check: Check, left: float) -> Verdict | None:
        """SKIPPED where this machine cannot run it; None where it can."""
        if check.needs_gpu and not self.here.has_gpu:
            return Verdict(SKIPPED, "no GPU: CUDA's driver finds no device")
        if self.here.cores < check.cores:
            return Verdict(
                SKIPPED, f"needs {check.cores} cores, this machine has {self.here.cores}"
            )
        lacking = [module for module in check.modules if module in self.here.missing]
        if lacking:
            names = ", ".join(map(install_name, lacking))
            return Verdict(SKIPPED, f"needs {names}, which {_is(lacking)} not installed")
        if left < check.least_s:
            return Verdict(SKIPPED, f"no time left: {max(0.0, left):.0f} s of {self.budget_s:g}")
        return None

    def _check(self, check: Check, log: Path, left: float) -> Verdict:
        limit = min(check.most_s, left)
        with tempfile.TemporaryDirectory(prefix="kvferry-gpu-check-") as scratch:
            path = Path(scratch, "record.json")
            try:
                ended = self.run(check.command(path, Path(scratch)), log, limit)
                found = read(path)
                verdict = verdict_of(ended, log, found, check.judge, limit < check.most_s)
                if found is not None:
                    self._keep(check, found[1])
            except Exception as error:
                # One check must not void the others.
                return Verdict(FAILED, f"{type(error).__name__}: {error}")
        return verdict

    def _keep(self, check: Check, record: Record) -> None:
        kept = kept_of(record, check.rows, check.figures, check.name)
        self.record.rows += kept.rows
        self.record.figures += kept.figures
        self.record.parameters |= kept.parameters
        self.record.versions |= kept.versions

    @property
    def num_failed(self) -> int:
        return sum(done.verdict.state == FAILED for done in self.done)

    def next_step(self) -> str:
        """What to do with the result."""
        failed = [done for done in self.done if done.verdict.state == FAILED]
        if failed:
            logs = ", ".join(str(done.log) for done in failed if done.log)
            return f"next: read {logs or 'the reasons above'}, then run --only with their names"
        if not self.here.has_gpu:
            return "next: run `make gpu-check` on a machine with a GPU"
        if self.here.missing:
            names = " ".join(map(install_name, sorted(self.here.missing)))
            return f"next: install {names}, and run this again for the rows that need them"
        if any("no time left" in done.verdict.reason for done in self.done):
            return "next: run this again with a larger --budget"
        return "next: where vLLM is installed, `make gpu-demo`"


def _is(words: Sequence[str]) -> str:
    return "is" if len(words) == 1 else "are"
