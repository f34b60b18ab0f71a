"""Every command that is given, with `--help`: what it printed, and which modules that loaded.

    python tests/help_of_all.py '[["benchmarks.kvbench"], ["remote_server.cli", "bench"]]'

The first word is a module, or a file that ends in `.py`. One interpreter is forked for each
command: most of the time of a small command is the start of Python and of the libraries that all
of them load. Prints one JSON object for each, in order.
"""

import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

# What nearly every command loads, and is quick.
SHARED = (
    *("numpy", "zmq", "msgspec", "xxhash", "http.client"),
    *("remote_server.server.server", "remote_server.client", "remote_server.fleet.fleet"),
    "benchmarks.harness.runner",
)

HANGS_AFTER_S = 30


def run(command: Sequence[str]) -> dict[str, object]:
    """`python -m MODULE … --help` in this process, which must not go on after it."""
    program, *rest = command
    sys.argv = [program, *rest, "--help"]
    printed, status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed):
        try:
            if program.endswith(".py"):
                sys.path[0] = str(Path(program).resolve().parent)
                runpy.run_path(program, run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    return {"status": status, "printed": printed.getvalue(), "modules": sorted(sys.modules)}


def forked(command: Sequence[str]) -> dict[str, object]:
    """`run` in a child, which ends after `HANGS_AFTER_S` whatever it does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS_AFTER_S)
        os.close(reading)
        with os.fdopen(writing, "w") as answer:
            json.dump(run(command), answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if text else {"status": status, "printed": "", "modules": []}


if __name__ == "__main__":
    for shared in SHARED:
        importlib.import_module(shared)
    for command in json.loads(sys.argv[1]):
        print(json.dumps(forked(command)), flush=True)
