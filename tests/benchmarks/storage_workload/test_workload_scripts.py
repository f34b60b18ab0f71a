"""The source's scripts, as files beside the storage workload."""

import os
import shlex
import subprocess

import pytest

from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.commands.scripts import scripts

FOLDER = REPOSITORY / "benchmarks" / "storage_workload"


@pytest.mark.parametrize(
    "command",
    ["python3 kv-cache.py", "python3 kv-cache_sharegpt_replay.py", "./kv-cache-wrapper.sh",
     "./validate.sh", "./kv-cache.py"],
)  # fmt: skip
def test_each_script_of_the_source_runs_in_its_folder_without_a_path_of_modules(command: str):
    words = shlex.split(command)
    module = scripts()[words[-1].removeprefix("./")]
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    shown = subprocess.run(
        [*words, "--help"], cwd=FOLDER, env=without, capture_output=True, text=True, timeout=60,
        check=True,
    ).stdout  # fmt: skip
    assert shown.startswith(f"usage: python -m {' '.join(module)} [-h] ")


def test_a_script_runs_from_any_folder_and_returns_the_status_of_its_program(tmp_path):
    ended = subprocess.run(
        ["python3", FOLDER / "kv-cache.py", "--scenario", "quik"], cwd=tmp_path,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "did you mean quick?" in ended.stderr
