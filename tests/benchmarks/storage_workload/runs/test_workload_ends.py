"""A run that is ended from outside, and one that is run again: real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.storage_workload import __main__ as storage_workload
from benchmarks.storage_workload.runs import run

pytestmark = pytest.mark.real_time

QUICK = [
    "--model", "tiny-1b", "--num-users", "3", "--cpu-mem-gb", "0.05", "--gpu-mem-gb", "0",
    "--generation-mode", "none", "--bytes-scale", "0.01", "--think-scale", "0.05",
    "--storage-capacity-gb", "0.1",
]  # fmt: skip

# The command line as it is, with a progress line ten times a second to wait for.
OFTEN = (
    "import sys; from benchmarks.storage_workload import __main__ as it; "
    "from benchmarks.storage_workload.runs import progress; "
    "progress.LOGGED_EVERY_S = 0.1; sys.exit(it.main(sys.argv[1:]))"
)


def begin(folder: Path, *more: str) -> "subprocess.Popen[str]":
    words = [*QUICK, "--cache-dir", str(folder), "--output", str(folder / "run.json"), *more]
    return subprocess.Popen(
        [sys.executable, "-c", OFTEN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def wait_for(process: "subprocess.Popen[str]", word: str) -> None:
    """Until a progress line reports it."""
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"it ended before it said {word!r}: {process.communicate()}")


def test_sigterm_keeps_what_was_measured_and_leaves_no_folder(tmp_path):
    with begin(tmp_path, "--duration", "600", "--seed", "1") as process:
        wait_for(process, "of the blocks found")
        assert any(path.is_dir() for path in tmp_path.iterdir()), "the disk tier has its folder"
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Interrupted: only the results until then" in out and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["interrupted"] is True and written["summary"]["total_requests"] > 0
    assert all(line["agrees"] for line in written["accounting"]) and written["accounting"]
    assert written["summary"]["elapsed_s"] < 500


def test_a_signal_before_anything_is_measured_is_130_without_a_traceback(capsys, monkeypatch):
    def execute(_options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(storage_workload, "execute", execute)
    before = signal.getsignal(signal.SIGTERM)
    assert storage_workload.main(QUICK) == 130
    said = capsys.readouterr().err
    assert said.startswith("interrupted") and "no result is written" in said
    assert signal.getsignal(signal.SIGTERM) is before


def digests(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str, str]:
    """Of a run: in its JSON, in what it printed, and its seed."""
    file = folder / "run.json"
    words = [*QUICK, "--duration", "0.3", "--no-disk", "--output", str(file), *more]
    assert storage_workload.main(words) in (0, 1)
    written = json.loads(file.read_text())
    printed = capsys.readouterr().out
    assert f"Requests: seed {written['seed']}, digest {written['request_digest']}" in printed
    digest = printed.split("digest ")[1].split()[0]
    return written["request_digest"], digest, str(written["seed"])


def test_a_seed_asks_for_the_same_again_and_another_for_something_else(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(run, "HEADROOM_S", 0.05)
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 7)
    drawn = digests(tmp_path, capsys)
    assert drawn[0] == drawn[1] and drawn[2] == str(2**32 - 7)
    assert digests(tmp_path, capsys, "--seed", drawn[2]) == drawn, "the seed that it said"
    other = digests(tmp_path, capsys, "--seed", str(int(drawn[2]) + 1))
    assert other[0] == other[1] != drawn[0]


def test_a_json_that_can_no_longer_be_written_costs_neither_the_report_nor_the_reason(
    capsys, monkeypatch
):
    monkeypatch.setattr(run, "HEADROOM_S", 0.05)
    words = [*QUICK, "--duration", "0.3", "--no-disk", "--output", "/dev/full"]
    assert storage_workload.main(words) == 1
    printed = capsys.readouterr()
    assert "OVERALL PERFORMANCE" in printed.out
    assert printed.err == "not written: [Errno 28] No space left on device\n"
