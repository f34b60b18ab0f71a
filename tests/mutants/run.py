"""The check of the checks: each fault of `mutants.toml` must make its test fail (`make mutants`).

    python tests/mutants/run.py [--jobs N] [-k WORD]

Each worker has a copy of the tree. First every named test must pass there. Then a worker applies
one fault after the other, runs the one test that the row names, and restores the file. For a fault
in C it builds the library again. Verdicts:

    killed    the test failed
    SURVIVED  the test passed: nothing protects this line
    STALE     the text is not in the file exactly once
    BROKEN    the test does not pass without the fault, or pytest ended otherwise than by a failure
    HUNG      the test did not end in time, and the row has no `hangs = true`
    skipped   no C compiler, or the test skips itself on this host

The exit status is 1 if any verdict is in capitals.
"""

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mutant_table import ROOT, Mutant, read

from remote_server.native import build

LIBRARY = Path("remote_server", "native", build.LIBRARY)

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--force-reruns", "0")
PASSED, FAILED = 0, 1

HANG_S = 300.0
FIRST_RUN_S = 900.0
"""For all named tests of one worker, without a fault."""

FIRST_TIME = 1_000_000_000
"""Seconds; long before any file of the tree was written."""

VERDICTS = ("killed", "SURVIVED", "STALE", "BROKEN", "HUNG", "skipped")
NAME_WIDTH = 46

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    word: str
    reason: str
    seconds: float = 0.0


@dataclass
class Copy:
    """A worker's copy of the tree, and the process that runs in it."""

    folder: Path
    tests: list[str] = field(default_factory=list)
    """Those that it runs without a fault."""

    is_stopped: bool = False
    _changes: int = 0
    _process: subprocess.Popen[bytes] | None = None

    def run(self, arguments: Iterable[str], longest_s: float) -> tuple[int | None, str]:
        """Exit status of Python with `arguments`, and its output. None: it did not end in time."""
        if self.is_stopped:
            return None, "stopped"
        # In front of an editable install, which names another tree.
        environment = {**os.environ, "PYTHONPATH": str(self.folder)}
        with tempfile.TemporaryFile() as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], cwd=self.folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                status: int | None = self._process.wait(longest_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                self._end()
            output.seek(0)
            return status, output.read().decode(errors="replace")

    def stop(self) -> None:
        """End what runs; nothing runs here from now on."""
        self.is_stopped = True
        self._end()

    def _end(self) -> None:
        """End the process with all that it started and left behind."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def write(self, path: Path, text: str) -> None:
        """Give each text a time that no other has: bytecode is found by a file's time, in seconds,
        and its size, and a fault may keep both."""
        self._changes += 1
        path.write_text(text)
        os.utime(path, (FIRST_TIME - self._changes,) * 2)

    def judge(self, mutant: Mutant) -> Verdict:
        began = time.monotonic()
        path = self.folder / mutant.file
        original = path.read_text() if path.exists() else ""
        faulty = mutant.applied(original)
        if faulty is None:
            count = original.count(mutant.before)
            return Verdict(mutant, "STALE", f"the text is {count} times in {mutant.file}")
        if mutant.is_c and not any(build.compilers()):
            return Verdict(mutant, "skipped", "no C compiler")
        library = self.folder / LIBRARY
        kept = library.read_bytes() if mutant.is_c and library.exists() else None
        self.write(path, faulty)
        try:
            word, reason = self._judge_applied(mutant)
        finally:
            self.write(path, original)
            if kept is not None:
                # A process may have mapped the other one: a new file, not new contents.
                library.unlink(missing_ok=True)
                library.write_bytes(kept)
        return Verdict(mutant, word, reason, time.monotonic() - began)

    def _judge_applied(self, mutant: Mutant) -> tuple[str, str]:
        if mutant.is_c:
            status, output = self.run(["-m", "remote_server.native.build"], HANG_S)
            if status != 0:
                return "BROKEN", _last_line(output)
        status, output = self.run([*PYTEST, mutant.test], HANG_S)
        if status is None:
            return ("killed", "hangs") if mutant.hangs else ("HUNG", f"after {HANG_S:.0f} s")
        if status == FAILED:
            return "killed", _error(output)
        if status != PASSED:
            return "BROKEN", f"pytest ended with {status}: {_last_line(output)}"
        if "passed" not in _summary(output):
            return "skipped", "its test is skipped here"
        return "SURVIVED", f"{mutant.test} passed"

    def failing(self) -> dict[str, str]:
        """Those of its tests that do not pass without a fault, with the reason."""
        options = [option for option in PYTEST if option != "-x"]
        if not self.tests or self.run([*options, *self.tests], FIRST_RUN_S)[0] == PASSED:
            return {}
        failing = {}
        for test in self.tests:
            status, output = self.run([*PYTEST, test], HANG_S)
            if status != PASSED:
                failing[test] = _error(output) if status == FAILED else _last_line(output)
        return failing


def _error(output: str) -> str:
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("E ")] or lines[-1:] or ["no output"]
    return errors[0].removeprefix("E ").strip()


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].strip()


def _summary(output: str) -> str:
    """The line with how many passed, failed and were skipped."""
    lines = [line for line in output.splitlines() if " in " in line]
    return lines[-1] if lines else ""


def copy_tree(target: Path) -> Copy:
    """All files that git knows or would add, with the library that is built here."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split("\0")  # fmt: skip
    for name in [*listed, str(LIBRARY)]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return Copy(target)


def on_all(copies: Sequence[Copy], work: Callable[[Copy], Result]) -> list[Result]:
    """`work` of all copies beside each other. Ctrl-C ends what runs in them."""
    with ThreadPoolExecutor(len(copies)) as pool:
        try:
            return list(pool.map(work, copies))
        except KeyboardInterrupt:
            for copy in copies:
                copy.stop()
            raise


def first_run(copies: Sequence[Copy], mutants: Sequence[Mutant]) -> dict[str, str]:
    """Runs all named tests without a fault: those that do not pass, with the reason.

    Tests of one file run in one worker, because its fixtures start once for all of them.
    """
    by_file: dict[str, list[str]] = {}
    for test in dict.fromkeys(mutant.test for mutant in mutants):
        by_file.setdefault(test.partition("::")[0], []).append(test)
    for tests in by_file.values():
        min(copies, key=lambda copy: len(copy.tests)).tests.extend(tests)
    failing: dict[str, str] = {}
    for part in on_all(copies, Copy.failing):
        failing |= part
    return failing


def judge_all(
    copies: Sequence[Copy], mutants: Sequence[Mutant], failing: Mapping[str, str]
) -> Counter[str]:
    """Prints each verdict when it is there, and returns how many there are of each."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    for mutant in sorted(mutants, key=lambda mutant: not mutant.is_c):  # the longest first
        waiting.put(mutant)
    verdicts: Counter[str] = Counter()
    lock = threading.Lock()

    def work(copy: Copy) -> None:
        while not copy.is_stopped:
            try:
                mutant = waiting.get_nowait()
            except queue.Empty:
                return
            if mutant.test in failing:
                reason = f"fails without a fault: {failing[mutant.test]}"
                verdict = Verdict(mutant, "BROKEN", reason)
            else:
                verdict = copy.judge(mutant)
            with lock:
                verdicts[verdict.word] += 1
                print(_line(verdict, verdicts.total(), len(mutants)), flush=True)

    on_all(copies, work)
    return verdicts


def _line(verdict: Verdict, number: int, count: int) -> str:
    name = f"{verdict.mutant.name:{NAME_WIDTH}}"
    return (
        f"{number:3}/{count} {verdict.word:8} {name} {verdict.seconds:5.1f} s  "
        f"{verdict.reason[:100]}"
    ).rstrip()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Do the tests fail when the product is wrong?")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1),
        help="workers beside each other (default: two for each core, since many tests wait)",
    )  # fmt: skip
    parser.add_argument(
        "-k", metavar="WORD", action="append", default=[],
        help="only faults with it in their name, file or test; given twice: with any of them",
    )  # fmt: skip
    flags = parser.parse_args(arguments)
    wanted = flags.k or [""]
    mutants = [
        one for one in read() if any(word in f"{one.name} {one.file} {one.test}" for word in wanted)
    ]
    if not mutants:
        parser.error(f"no fault has {' or '.join(wanted)} in its name, file or test")
    jobs = max(1, min(flags.jobs, len(mutants)))
    print(f"{len(mutants)} faults, {jobs} workers; first all tests without a fault", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        copies = [copy_tree(Path(folder, str(number))) for number in range(jobs)]
        failing = first_run(copies, mutants)
        seconds = time.monotonic() - began
        print(f"{seconds:.0f} s: {len(failing)} tests failed without a fault", flush=True)
        verdicts = judge_all(copies, mutants, failing)
    counts = ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS)
    print(f"{counts}; {(time.monotonic() - began) / 60:.1f} min")
    return int(any(verdicts[word] for word in VERDICTS if word.isupper()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
