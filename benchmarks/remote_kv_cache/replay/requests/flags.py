"""The flags that choose recorded requests."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import options

ANY = "a trace of Mooncake, Qwen-Bailian or BurstGPT, plain or gzipped"
CHATS = "chats, in the format of the Mooncake paper"


def add_trace(add: Callable[..., argparse.Action], what: str, *, required: bool = False) -> None:
    add("--trace", type=Path, metavar="FILE", required=required, help=what)


def add_requests(add: Callable[..., argparse.Action], what: str = "of the trace") -> None:
    add("--requests", type=options.positive, metavar="NUMBER", help=f"only the first {what}")
