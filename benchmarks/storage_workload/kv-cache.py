#!/usr/bin/env python3
# ruff: noqa: N999
"""The source's `kv-cache.py`: `python -m benchmarks.storage_workload` from any folder.

Runs in the repository's `.venv` where there is one, and otherwise in the Python that started it.
"""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def main() -> None:
    python = str(REPOSITORY / ".venv" / "bin" / "python")
    if not os.access(python, os.X_OK):
        python = sys.executable
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Without PYTHONSAFEPATH, modules of the current folder would come before all others.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    os.execve(python, [python, "-m", "benchmarks.storage_workload", *sys.argv[1:]], env)


if __name__ == "__main__":
    main()
