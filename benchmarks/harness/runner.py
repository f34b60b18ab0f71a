"""Trials of several variants of the same work, interleaved.

A machine drifts: a neighbour becomes busy, the clock steps down. Ten trials of A and then ten of B
measure that drift; A, B, A, B… distributes it. Each round runs every case once and begins at
another case, so that no case always follows the same predecessor.
"""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self, TextIO, TypeVar

from benchmarks.harness.journal import Journal

T = TypeVar("T")


class Skipped(Exception):
    """This cannot be measured here. The message is the reason, and is part of the result."""


NOT_JUDGED = "not judged: "


class NotJudged(Skipped):
    """The machine did not do its part in time, so that the run shows nothing about the product."""

    def __str__(self) -> str:
        return f"{NOT_JUDGED}{super().__str__()}"


class WrongBytes(AssertionError):
    """The bytes that arrived differ from those sent: the time is void."""


def in_words(error: BaseException) -> str:
    """The kind of an error and its message. One without a message, as of a bare `assert`, has the
    place and the line that raised it."""
    text = f"{error}".strip()
    if not text and (frames := traceback.extract_tb(error.__traceback__)):
        last = frames[-1]
        text = f"{Path(last.filename).name}, line {last.lineno}: {last.line}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def nothing() -> None:
    """The `prepare` or `verify` of a case that needs none."""


@dataclass(frozen=True)
class Case:
    """One variant. Only `run` is timed; `verify` raises `WrongBytes`.

    Any of the three may raise `Skipped`, which ends only this case.
    """

    key: Hashable
    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    verify: Callable[[], object] = nothing

    @classmethod
    def skipped(cls, key: Hashable, reason: object) -> "Case":
        """A case that cannot run here; its row has the reason."""
        why = str(reason)  # the exception's traceback would keep alive the objects of its frames

        def skip() -> None:
            raise Skipped(why)

        return cls(key, skip)


@dataclass
class Sample:
    """Seconds of one case. `skipped` and `failed` give the reason for none."""

    values: list[float] = field(default_factory=list)
    warm_ups: list[float] = field(default_factory=list)
    skipped: str | None = None
    failed: str | None = None

    @property
    def measured(self) -> bool:
        return bool(self.values) and self.failed is None and self.skipped is None

    def timed(self, trials: Sequence[T]) -> Sequence[T]:
        """The trials of `values`. `trials` has one element a run, warm-ups first; an interrupted
        trial may be its last."""
        return trials[len(self.warm_ups) :][: len(self.values)]


class Runner:
    """Measures, prints its progress, and keeps the complete trials when interrupted.

        with Runner(trials=5) as runner:
            for model in models:
                samples = runner.measure(model.name, cases)

    Ctrl-C and SIGTERM end the block, not the program: `interrupted` is True afterwards, and the
    samples of an interrupted `measure` hold the complete trials.

    `total` is the amount of the whole run, in the unit of `measure`'s `weight`, such as bytes.
    With it the progress line estimates the rest of the run, without it the rest of this
    measurement. Progress is shown in one of `rounds_a_line` rounds.
    """

    def __init__(
        self,
        trials: int,
        warm_ups: int = 1,
        progress: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        total: float = 0.0,
        journal: Journal | None = None,
        rounds_a_line: int = 1,
    ) -> None:
        self.trials = trials
        self.warm_ups = warm_ups
        self.interrupted = False
        self.num_failed = 0
        self.journal = Journal() if journal is None else journal
        self._kept = 0.0
        self._rounds_a_line = rounds_a_line
        self._progress = progress if progress is not None else sys.stderr
        self._clock = clock
        self._shown = 0
        self._total = total
        self._done = 0.0
        self._started = clock()
        self._restore_sigterm: Callable[[], object] = nothing

    def is_measured(self, title: str, key: Hashable) -> bool:
        """Whether the journal has every trial of a case, so that nothing of it has to run."""
        kept = [self.journal.get(title, key, n) for n in range(self.warm_ups + self.trials)]
        return None not in kept or any("skipped" in (one or {}) for one in kept)

    def measure(
        self, title: str, cases: Sequence[Case], weight: float = 0.0
    ) -> dict[Hashable, Sample]:
        """Run every case `warm_ups` + `trials` times, or until interrupted. Trials that the journal
        has are not run again."""
        samples: dict[Hashable, Sample] = {case.key: Sample() for case in cases}
        rounds = self.warm_ups + self.trials
        began = self._clock()
        self._kept = 0.0
        try:
            for number in range(rounds):
                first = number % max(1, len(cases))
                where = f"{title}: round {number + 1} of {rounds}"
                is_shown = number % self._rounds_a_line == 0
                if is_shown:
                    self._log(where + self._left(began, number / rounds, weight))
                for place, case in enumerate([*cases[first:], *cases[:first]]):
                    sample = samples[case.key]
                    if sample.skipped is None and sample.failed is None:
                        done = (number + place / len(cases)) / rounds
                        if is_shown:
                            self.show(f"{where}{self._left(began, done, weight)}: {case.key}")
                        if not self._take_kept(title, case, sample, number):
                            self._trial(case, sample, warm_up=number < self.warm_ups)
                            self._keep(title, case, sample, number)
                            continue
                    self._kept += 1 / (rounds * len(cases))
        except KeyboardInterrupt:
            self.interrupted = True
        self._done += weight
        self.show("")
        return samples

    def show(self, text: str) -> None:
        """Replace the progress line. Nothing is shown unless stderr is a terminal."""
        if self._progress.isatty():
            self._progress.write(f"\r{text:<{self._shown}}\r{text}"[:200])
            self._progress.flush()
            self._shown = len(text)

    def _log(self, text: str) -> None:
        """A line for a log, when stderr is not a terminal."""
        if not self._progress.isatty():
            self._progress.write(f"{text}\n")
            self._progress.flush()

    def _left(self, began: float, done: float, weight: float) -> str:
        """An estimate of the remaining time at the rate so far; empty without a basis. What an
        earlier run has measured took no time."""
        kept = self._kept
        if weight and self._total:
            began, done = self._started, (self._done + weight * done) / self._total
            kept *= weight / self._total
        if not kept < done <= 1:
            return ""
        minutes, seconds = divmod(
            round((self._clock() - began) * (1 - done) / (done - kept)), 60
        )  # fmt: skip
        return f", about {minutes} min {seconds} s left" if minutes else f", about {seconds} s left"

    def _take_kept(self, title: str, case: Case, sample: Sample, number: int) -> bool:
        kept = self.journal.get(title, case.key, number)
        if kept is None:
            return False
        sample.skipped = kept.get("skipped")
        if "seconds" in kept:
            values = sample.warm_ups if number < self.warm_ups else sample.values
            values.append(kept["seconds"])
        return True

    def _keep(self, title: str, case: Case, sample: Sample, number: int) -> None:
        """A failure, and what was not judged, is not kept: it is tried again."""
        if sample.skipped is not None and sample.skipped.startswith(NOT_JUDGED):
            return
        if sample.skipped is not None:
            self.journal.put((title, case.key, number), {"skipped": sample.skipped})
        elif sample.failed is None:
            seconds = (sample.warm_ups if number < self.warm_ups else sample.values)[-1]
            self.journal.put((title, case.key, number), {"seconds": seconds})

    def _trial(self, case: Case, sample: Sample, *, warm_up: bool) -> None:
        try:
            case.prepare()
            started = self._clock()
            case.run()
            seconds = self._clock() - started
            case.verify()
        except Skipped as reason:
            sample.skipped = str(reason)
        except Exception as error:
            # One broken comparator must not void the hour that the others took. Its row and the
            # exit status record the failure.
            sample.failed = in_words(error)
            self.num_failed += 1
        else:
            (sample.warm_ups if warm_up else sample.values).append(seconds)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._on_sigterm)
            self._restore_sigterm = partial(signal.signal, signal.SIGTERM, before)
        return self

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """The first signal acts as Ctrl-C. `timeout` sends two at once; the second must not
        interrupt the clean-up after the first, nor the writing of results."""
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._restore_sigterm = nothing
        raise KeyboardInterrupt

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._restore_sigterm()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.interrupted = True
            return True
        return False
