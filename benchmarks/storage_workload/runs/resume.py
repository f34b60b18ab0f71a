"""Resumption of a sequence of runs: the recorded runs of an earlier one that need not run again.

A record is kept when its run reached its end, with the same command, source, host and machine. A
source with changes beside its commit is not known, so its records are not kept.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import machine, origin
from benchmarks.storage_workload.pages.document import BENCHMARK
from benchmarks.storage_workload.plan.options import Options


class Recorded(NamedTuple):
    """An earlier run: its document, or why it must run again."""

    document: Mapping[str, Any] | None
    why_not: str = ""


class Here(NamedTuple):
    """The facts of this process that a record must share."""

    source: Mapping[str, Any]
    host: Mapping[str, Any]
    machine: Mapping[str, Any]

    @classmethod
    def found(cls) -> "Here":
        return cls(origin.source(), origin.host(), machine.describe())


def measured(options: Options) -> Options:
    """`options` without the names of result files, which change no figure."""
    return replace(options, output=None, html=None, plots=None)


def command_of(options: Options) -> str:
    """The command in the record of a run with these options."""
    return shlex.join(["python", "-m", BENCHMARK, *measured(options).arguments()])


def recorded(path: Path, options: Options, here: Here) -> Recorded:
    """The run with `options` that `path` has the document of."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        why_not = _why_not(document, options, here)
    except FileNotFoundError:
        return Recorded(None, "it has no record")
    except (OSError, ValueError, KeyError, TypeError):
        return Recorded(None, "its record cannot be read")
    return Recorded(None, why_not) if why_not else Recorded(document)


def seed_of(path: Path) -> int | None:
    """The seed of the run that `path` has the document of, if there is one."""
    try:
        seed = json.loads(path.read_text(encoding="utf-8"))["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) else None


def _why_not(document: Mapping[str, Any], options: Options, here: Here) -> str:
    if document["interrupted"] or document["failure"] is not None:
        return "it did not reach its end"
    if document["command"] != command_of(options):
        return "its record is of another command"
    if not (document["source"] and here.source):
        return "the commit of the source is not known"
    if document["source"]["commit"] != here.source["commit"]:
        return "its record is of another commit"
    if not (document["source"]["clean"] and here.source["clean"]):
        return "the source has changes beside its commit"
    if document["host"] != here.host or any(
        document["machine"][name] != fact for name, fact in here.machine.items()
    ):
        return "its record is of another machine"
    return ""
