"""The committed records made again: `python -m benchmarks records`.

Each record is made by the command that it has, in a folder of its own, and replaces the committed
one only when that run has ended. A record that this commit has made already is kept, so a run that
was interrupted goes on where it ended.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import origin
from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.record import Record, RecordError

TRACE = "KVFERRY_TRACE"
"""The variable that names the trace of the commands that replay one."""

_TRACE_FILE = "conversation_trace.jsonl"
_OUTPUT = {"benchmarks.storage_workload": "--output"}
_VALIDATE = "validate"
"""Of `storage_workload`: it writes a file for each trial, and the record beside them."""
_NOISY_PERCENT = 3.0
"""A record for which the host took more CPU time than this is to be made again."""

_CLEAN_UP_S = 60.0
"""The time that a run has for its clean end after Ctrl-C."""

_INTERRUPTED = 130
_CANNOT = 2


OUTPUT = "output.txt"
"""What the commands print, in the folder where they run."""


class Outcome(NamedTuple):
    """What became of one record."""

    name: str
    what: str
    """`made`, `kept`, or why it is the one of before."""

    made: bool = False
    kept: bool = False
    """It is of this commit already. Neither: nothing was made, and `what` has the reason."""


class Remaking(NamedTuple):
    """The records to be made, and the folder where they are made."""

    results: Path
    folder: Path
    show: Callable[[str], None]
    run: Callable[[Sequence[str], Path], int]
    """Runs a command in a folder and returns its exit status."""

    trials: int | None = None
    """In place of the `--trials` that commands name; None keeps them."""

    def chosen(self, patterns: Sequence[str]) -> list[Path]:
        """The records whose names match one of `patterns`; all without any."""
        files = sorted(self.results.glob("*.json"))
        return [f for f in files if not patterns or any(fnmatch(f.stem, p) for p in patterns)]

    def all(self, patterns: Sequence[str]) -> Iterator[Outcome]:
        """One after the other; Ctrl-C ends it, with what was made until then."""
        files = self.chosen(patterns)
        began, num_made = time.monotonic(), 0
        for number, file in enumerate(files):
            left = ""
            if num_made:
                seconds = (time.monotonic() - began) / num_made * (len(files) - number)
                left = f", about {seconds / 60:.0f} min left"
            self.show(f"{number + 1} of {len(files)}: {file.stem}{left}")
            outcome = self.one(file)
            num_made += outcome.made
            yield outcome

    def one(self, file: Path) -> Outcome:
        """Make one record. Raises `KeyboardInterrupt` when its run was interrupted."""
        try:
            before = Record.read(file)
        except RecordError as error:
            return Outcome(file.stem, str(error))
        if self._is_current(before):
            return Outcome(file.stem, "kept: it is of this commit", kept=True)
        words = self._with_trials(shlex.split(before.command)[1:])
        if _TRACE_FILE in words and not self._trace():
            return Outcome(file.stem, f"not made: {TRACE} names no {_TRACE_FILE}")
        option, new = _output(before.benchmark, words, self.folder / file.name)
        new.unlink(missing_ok=True)
        status = self.run([sys.executable, *words, *option], self.folder)
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if status == _CANNOT or not new.exists():
            output = self.folder / OUTPUT
            return Outcome(file.stem, f"not made: its command ended with {status}; see {output}")
        made = Record.read(new)
        if made.interrupted:
            return Outcome(file.stem, "not made: it was interrupted")
        if failed := [f"{row.operation}: {row.sample.failed}" for row in made.rows
                      if row.sample.failed is not None]:  # fmt: skip
            return Outcome(file.stem, f"not made: {len(failed)} rows FAILED: {failed[0]}")
        shutil.move(new, file)
        taken = made.stolen_percent or 0.0
        noisy = f", {taken:g} % of the CPU time taken by the host: make it again"
        what = f"made{noisy if taken > _NOISY_PERCENT else ''}{_lost(before, made)}"
        return Outcome(file.stem, what, made=True)

    def _with_trials(self, words: list[str]) -> list[str]:
        if self.trials is not None and "--trials" in words[:-1]:
            words[words.index("--trials") + 1] = str(self.trials)
        return words

    def _is_current(self, record: Record) -> bool:
        source = origin.source()
        return bool(source.get("clean")) and record.source == source and not record.interrupted

    def _trace(self) -> bool:
        link = self.folder / _TRACE_FILE
        there = Path(os.environ.get(TRACE, ""))
        if there.is_file():
            link.unlink(missing_ok=True)
            link.symlink_to(there.resolve())
        return link.exists()


def in_folder(results: Path, show: Callable[[str], None], trials: int | None = None) -> Remaking:
    """Real runs, in a folder that git ignores."""
    folder = REPOSITORY / ".cache" / "records"
    folder.mkdir(parents=True, exist_ok=True)
    return Remaking(results, folder, show, _run, trials)


def _lost(before: Record, made: Record) -> str:
    """The rows that are no longer measured, as where a peer is not installed."""
    measured = {row.identity for row in made.rows if row.sample.measured}
    lost = [row for row in before.rows if row.sample.measured and row.identity not in measured]
    if not lost:
        return ""
    return f", without {len(lost)} rows that it had, as {lost[0].operation}"


def _run(words: Sequence[str], folder: Path) -> int:
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with (
        (folder / OUTPUT).open("a") as output,
        subprocess.Popen(
            words, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as run,
    ):
        try:
            return run.wait()
        except KeyboardInterrupt:
            # It has the signal as well, and ends its servers and removes its files.
            try:
                run.wait(_CLEAN_UP_S)
            except subprocess.TimeoutExpired:
                run.terminate()
                run.wait()
            raise


def _output(benchmark: str, words: Sequence[str], file: Path) -> tuple[list[str], Path]:
    """The option by which a command writes its record to `file`, or into a folder of its own."""
    if _VALIDATE in words:
        folder = file.with_suffix("")
        return ["--folder", str(folder)], folder / "validation.json"
    return [_OUTPUT.get(benchmark, "--json"), str(file)], file
