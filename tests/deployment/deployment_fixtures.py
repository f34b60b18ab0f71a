"""The wheel, built and installed into an environment of its declared dependencies only.

It is built from a source archive of a copy of the tree, as `python -m build` does, without a
network. The environment it goes into begins empty and gets links to the distributions that the
wheel's own metadata asks for, and to what these ask for: what is not declared is not there.
"""

import importlib.metadata
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LIBRARY = "remote_server/native/libkvferry.so"
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "__pycache__", "build", "dist", "*.egg-info", "*.so"
)  # fmt: skip
# What a shell of a stranger has: no path to this tree, no settings.
CLEAN = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
NO_COMPILER = CLEAN | {"PATH": "/nonexistent"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, and not from the tree: both must be complete."""
    place = tmp_path_factory.mktemp("build")
    archive = place / build("sdist", copy_of_the_tree(place / "tree"), place)
    with tarfile.open(archive) as packed:
        packed.extractall(place / "unpacked", filter="data")
    (source,) = (place / "unpacked").iterdir()
    return place / build("wheel", source, place)


def copy_of_the_tree(place: Path) -> Path:
    shutil.copytree(REPOSITORY, place, ignore=NOT_SOURCES)
    return place


def build(kind: str, source: Path, into: Path) -> str:
    """What a build front end calls; the name of the file that was made in `into`."""
    return output_of_build(kind, source, into).splitlines()[-1]


def output_of_build(kind: str, source: Path, into: Path, *, compiler: bool = True) -> str:
    """All that it printed, the name in the last line."""
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(into)!r}))"
    if not compiler:
        code = f"import sys; sys.modules['ziglang'] = None; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=CLEAN if compiler else NO_COMPILER, text=True,
        timeout=240, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class Installed(NamedTuple):
    """A virtual environment with the wheel in it, and a folder outside of any source tree."""

    bin: Path
    home: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        program, *arguments = command
        return subprocess.run(
            [self.bin / program, *arguments], cwd=self.home, env=CLEAN, text=True, timeout=120,
            capture_output=True, check=False,
        )  # fmt: skip


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(wheel, tmp_path_factory.mktemp("installed"))


def install(wheel: Path, place: Path) -> Installed:
    """Into a new environment in `place`, on a host that seems to have no compiler."""
    environment, home = place / "environment", place / "home"
    home.mkdir()
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=120
    )
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install",
         "--quiet", "--no-index", "--no-deps", "--no-compile", wheel],
        check=True, timeout=120, env=NO_COMPILER | {"HOME": str(home)},
    )  # fmt: skip
    (packages,) = environment.glob("lib/python*/site-packages")
    link_requirements(packages, declared_by(wheel))
    return Installed(environment / "bin", home)


def declared_by(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as packed:
        (name,) = [name for name in packed.namelist() if name.endswith(".dist-info/METADATA")]
        lines = packed.read(name).decode().partition("\n\n")[0].splitlines()
    asked = [Requirement(line.partition(": ")[2]) for line in lines
             if line.startswith("Requires-Dist:")]  # fmt: skip
    return [one for one in asked if applies(one)]


def applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def link_requirements(packages: Path, wanted: list[Requirement]) -> None:
    """Links in `packages` to what the tests' own environment has of `wanted`, and of what these
    need. A version that is too old here fails, as it would in pip."""
    seen: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        found = importlib.metadata.distribution(requirement.name)
        assert requirement.specifier.contains(found.version, prereleases=True), requirement
        if found.name in seen:
            continue
        seen.add(found.name)
        tops = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", ".")}
        for top in tops - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
        needed = [Requirement(text) for text in found.requires or []]
        wanted += [one for one in needed if applies(one)]


@pytest.fixture(scope="session")
def serving(installed: Installed) -> Iterator[dict[str, str]]:
    """`kvferry serve` of the installed wheel: the addresses it named. Drained in the end."""
    command = [installed.bin / "kvferry", "serve", "--memory", "16MiB",
               "--bind", "tcp://127.0.0.1:*", "--admin", "http://127.0.0.1:*"]  # fmt: skip
    with (installed.home / "serve.err").open("w") as errors:
        process = subprocess.Popen(command, cwd=installed.home, env=CLEAN, text=True,
                                   stdout=subprocess.PIPE, stderr=errors)  # fmt: skip
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()  # empty when it ends: nothing waits for ever
            told = (installed.home / "serve.err").read_text()
            found = re.search(r"ready on (?P<data>\S+).* admin (?P<admin>\S+)", ready)
            assert found is not None, ready + told
            yield found.groupdict()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, (installed.home / "serve.err").read_text()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
