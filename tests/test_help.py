"""Every command answers `--help`, and loads nothing for it that takes seconds to load."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.commands import registry

ROOT = Path(__file__).resolve().parent.parent
PYTHONPATH = ".:tests/chaos:tests/chaos/network"  # as the Makefile has it for soaks
HEAVY = {"torch", "vllm", "transformers", "matplotlib", "pandas", "scipy", "aiohttp", "h5py"}

# The standard library's included. No command has more than 540 today; torch alone has 1,400.
MOST_MODULES = 800

# In a list of subcommands argparse indents each by four, and what it does follows.
SUBCOMMAND = re.compile(r"^ {4}([a-z][a-z-]*)(?: {2,}\S.*)?$", re.MULTILINE)

# `python -m remote_server` has those of one command.
_HAS_FLAGS = re.compile(r'ArgumentParser\(|run\("serve", sys\.argv\[1:\]')

Help = dict[str, Any]


def programs() -> list[str]:
    """What people run: the benchmarks, the installed scripts, and every file of ours that begins
    something by itself and has flags. A module by its name, a file of the tests by its path."""
    found = {one.module for one in registry.find().values()}
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    found |= {target.partition(":")[0] for target in scripts.values()}
    for folder in ("benchmarks", "examples", "kv_connector", "remote_server", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            if '\nif __name__ == "__main__":' in text and _HAS_FLAGS.search(text):
                path = file.relative_to(ROOT)
                module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
                found.add(str(path) if folder == "tests" else module)
    return sorted(found)


PROGRAMS = programs()


def ask(commands: list[list[str]]) -> list[Help]:
    ran = subprocess.run(
        [sys.executable, "tests/help_of_all.py", json.dumps(commands)],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=110,
        env={"PYTHONPATH": PYTHONPATH, "PATH": ""},
    )  # fmt: skip
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def helps() -> dict[str, list[Help]]:
    """By program: its own answer, and then that of each of its subcommands."""
    asked = ask([[name] for name in PROGRAMS])
    answers = {name: [answer] for name, answer in zip(PROGRAMS, asked, strict=True)}
    below = [
        [name, sub] for name in PROGRAMS for sub in SUBCOMMAND.findall(answers[name][0]["printed"])
    ]
    for (name, _), answer in zip(below, ask(below), strict=True):
        answers[name].append(answer)
    return answers


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_is_printed_and_loads_nothing_heavy(name: str, helps: dict[str, list[Help]]):
    for answer in helps[name]:
        assert answer["status"] == 0 and answer["printed"].startswith("usage: ")
        assert not HEAVY.intersection(answer["modules"])
        assert len(answer["modules"]) < MOST_MODULES


def test_commands_and_subcommands_are_found(helps: dict[str, list[Help]]):
    assert len(registry.find()) + 8 <= len(helps)
    assert {"examples.demo", "remote_server", "remote_server.cli.__main__"} <= helps.keys()
    usages = [answer["printed"].split("\n")[0] for answer in helps["remote_server.cli.__main__"]]
    assert any(usage.startswith("usage: kvferry serve ") for usage in usages)
    assert any(usage.startswith("usage: kvferry bench ") for usage in usages)
    assert len(helps["benchmarks"]) == 7, "list, run, compare, report, results, records, front"
