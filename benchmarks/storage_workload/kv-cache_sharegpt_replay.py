#!/usr/bin/env python3
# ruff: noqa: N999
"""The source's `kv-cache_sharegpt_replay.py`: `kv-cache.py`, which has `--dataset-path`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("kv-cache.py")), run_name="__main__")
