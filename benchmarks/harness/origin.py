"""The origin of a record: source, host and file systems. It has no host name and no path."""

import argparse
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]

_CLOCKS = "/sys/devices/system/clocksource/clocksource0"

_BLOCK_DEVICES = "/sys/dev/block"

_NOT_THE_SOURCE = ("benchmarks/results/", "docs/")
"""Changed files below these change no measurement: earlier runs have written them."""


def source() -> dict[str, Any]:
    """The commit of this source, and whether no file of it was changed. Empty without git."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return {}
    changed = [
        line[3:]
        for line in _git("status", "--porcelain", "--untracked-files=normal").splitlines()
        if not line[3:].startswith(_NOT_THE_SOURCE)
    ]
    return {"commit": commit.strip(), "clean": not changed}


def _git(*words: str) -> str:
    """What it prints; empty where it fails, or the folder is in no repository of its own."""
    if not (_ROOT / ".git").exists():
        return ""
    try:
        ended = subprocess.run(
            ["git", "-C", str(_ROOT), *words], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def host() -> dict[str, Any]:
    """What of the host can change a figure, beside its cores and memory. Facts that the kernel does
    not show are left out."""
    facts = {
        "cpu": _first(r"model name\s*:\s*(.+)", "/proc/cpuinfo") or platform.machine(),
        "kernel": platform.release(),
        "clock": _first(r"(\S+)", f"{_CLOCKS}/current_clocksource"),
        "huge_pages": _first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"),
        "numa_nodes": len([*Path("/sys/devices/system/node").glob("node[0-9]*")]),
    }
    return {name: fact for name, fact in facts.items() if fact}


def file_system(folder: Path) -> dict[str, str]:
    """Of the file system that holds `folder`: its type, its mount options, and its device:
    `rotational` or `solid`, as it describes itself, or `none`; the device's model, its I/O
    scheduler and its write cache where it has them. Empty where the kernel does not show it.
    Virtual disks often describe themselves as rotational, and have no model."""
    try:
        number = os.stat(folder).st_dev
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return {}
    device = f"{os.major(number)}:{os.minor(number)}"
    for line in mounts:
        words, _, rest = line.partition(" - ")
        if words.split()[2] == device:
            return {
                "type": rest.split()[0],
                "options": _without_values(words.split()[5].split(",")),
                "device": _kind_of(device),
                **_about_device(device),
            }
    return {}


def _without_values(options: Iterable[str]) -> str:
    """Options whose value is a path or a name stay without it."""
    return ",".join(
        each if re.fullmatch(r"[a-z_]+(=\w{1,12})?", each) else each.partition("=")[0]
        for each in options
    )


def _kind_of(device: str) -> str:
    kind = _fact_of_device(device, r"([01])", "queue/rotational")
    return {"1": "rotational", "0": "solid"}.get(kind, "none")


def _about_device(device: str) -> dict[str, str]:
    facts = {
        "model": _fact_of_device(device, r"(.+)", "device/model"),
        "scheduler": _fact_of_device(device, r"\[([\w-]+)\]", "queue/scheduler"),
        "write_cache": _fact_of_device(device, r"(.+)", "queue/write_cache"),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _fact_of_device(device: str, pattern: str, name: str) -> str:
    """A partition's facts are those of its disk."""
    folders = (f"{_BLOCK_DEVICES}/{device}", f"{_BLOCK_DEVICES}/{device}/..")
    found = (_first(pattern, f"{folder}/{name}") for folder in folders)
    return next((fact for fact in found if fact), "")


def _first(pattern: str, path: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return ""
    return found[1].strip() if found else ""


def storage(argv: Sequence[str]) -> dict[str, dict[str, str]]:
    """The file systems that a benchmark with these arguments may use: that of `--directory`, or the
    current one, and that of temporary files."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--directory", type=Path, default=Path())
    known, _ = parser.parse_known_args([word for word in argv if word != "--"])
    places = {"directory": known.directory, "temporary": Path(tempfile.gettempdir())}
    found = {name: file_system(folder) for name, folder in places.items()}
    return {name: facts for name, facts in found.items() if facts}
