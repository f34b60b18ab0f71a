"""All tests, in three processes beside each other: `make test`.

An engine's start keeps one core busy for half a minute, and most other tests wait longer than they
compute. Prints how far each process is and, when all have ended, what each one reported. Exits 1
when one of them failed. Ctrl-C ends them as it ends one pytest. `.cache/tests` keeps the outputs.
"""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".cache" / "tests"

FOLDERS = ("remote_server", "benchmarks")

PARTS = {
    "engines": ["-m", "engine"],
    "rest": ["-m", "not engine", *(f"--ignore=tests/{name}" for name in FOLDERS)],
    **{name: ["-m", "not engine", f"tests/{name}"] for name in FOLDERS},
}
"""In this order. `rest` has whatever the others do not name."""

AT_ONCE = 3

PROGRESS_S = 20.0
END_S = 60.0
"""An interrupted pytest ends its engines and servers first."""

PERCENT = re.compile(r"\[ *(\d+)%\]$", re.MULTILINE)
REPORT = re.compile(r"^=+ (FAILURES|ERRORS|short test summary info) =+$", re.MULTILINE)


class Part:
    """One pytest, with its output in a file."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name, self.log = name, LOGS / f"{name}.log"
        # With one cache they would overwrite each other's list of failed tests.
        options = ["-o", f"cache_dir=.pytest_cache/{name}"]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *arguments],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def progress(self) -> str:
        if self.process.poll() is not None:
            return f"{self.name} ended"
        percents = PERCENT.findall(self._text())
        return f"{self.name} {percents[-1] if percents else 0}%"

    def report(self) -> str:
        """What pytest printed after the tests, or all of it when it did not get there."""
        text = self._text()
        begins = REPORT.search(text)
        return f"── {self.name} ──\n{text[begins.start() if begins else 0 :].rstrip()}\n"

    def end(self) -> None:
        """It may have had the terminal's Ctrl-C already: pytest takes a second one as well."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _text(self) -> str:
        return self.log.read_text(errors="replace")


def main() -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts: list[Part] = []
    waiting = list(PARTS.items())
    try:
        while waiting or _running(parts):
            while waiting and len(_running(parts)) < AT_ONCE:
                parts.append(Part(*waiting.pop(0)))
            shown = ", ".join(part.progress() for part in parts)
            print(f"{(time.monotonic() - began) / 60:5.1f} min: {shown}", flush=True)
            _wait(parts, PROGRESS_S)
    except KeyboardInterrupt:
        for part in parts:
            part.end()
    print("\n".join(part.report() for part in parts), end="", flush=True)
    failed = [part.name for part in parts if part.process.returncode]
    verdict = f"failed: {', '.join(failed)}" if failed else "all passed"
    if len(parts) < len(PARTS):
        verdict += "; interrupted"
    logs = LOGS.relative_to(ROOT)
    print(f"{(time.monotonic() - began) / 60:.1f} min, {verdict}; outputs: {logs}/*.log")
    return int(bool(failed) or len(parts) < len(PARTS))


def _running(parts: list[Part]) -> list[Part]:
    return [part for part in parts if part.process.poll() is None]


def _wait(parts: list[Part], longest_s: float) -> None:
    """For so long, or until one more has ended."""
    running, ends = len(_running(parts)), time.monotonic() + longest_s
    while time.monotonic() < ends and len(_running(parts)) == running:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
