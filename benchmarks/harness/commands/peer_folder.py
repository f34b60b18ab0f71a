"""The folder of peers: `python -m benchmarks.peers` fills it, and benchmarks use it.

    .peers/NAME/packages    Python packages, and the programs in them
    .peers/NAME/root        Debian packages, unpacked: programs and their libraries
    .peers/NAME/.installed  the recipe of the installation; written last

This Python's packages and the PATH come first; an entry here never shadows them.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.runner import Skipped

VARIABLE = "KVFERRY_PEERS"
"""Environment variable: another folder."""

STAMP, PACKAGES, ROOT = ".installed", "packages", "root"

_PATIENCE_S = 60.0
_REPOSITORY = Path(__file__).resolve().parents[3]


class Program(NamedTuple):
    """A program, and the variables that its environment needs in addition."""

    path: str
    env: dict[str, str]


def default() -> Path:
    """The folder in use when none is named."""
    return Path(os.environ.get(VARIABLE) or _REPOSITORY / ".peers").resolve()


def installed(peer: str) -> Path | None:
    """The folder of `peer`; None when it is not fully installed."""
    folder = default() / peer
    return folder if (folder / STAMP).is_file() else None


def use(*peers: str) -> None:
    """Let this process import the installed packages of `peers`.

    They come last on the path: this Python's own modules are imported first.
    """
    for peer in peers:
        folder = installed(peer)
        if folder is not None and (path := str(folder / PACKAGES)) not in sys.path:
            sys.path.append(path)


def package(peer: str, module: str) -> Any:
    """`module`, of this Python or of `peer`. Raises `Skipped` with an import's error."""
    use(peer)
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package built for CUDA raises any error of its loader
        raise Skipped(f"cannot import {module.partition('.')[0]}: {error}{_hint(peer)}") from None


def program(peer: str, name: str) -> Program:
    """`name` on the PATH, beside this Python, or of `peer`. Raises `Skipped` when there is none."""
    beside = str(Path(sys.executable).parent)
    if found := shutil.which(name) or shutil.which(name, path=beside):
        return Program(found, {})
    if folder := installed(peer):
        return of_folder(folder, name)
    raise Skipped(f"no {name} on the PATH{_hint(peer)}")


def of_folder(folder: Path, name: str) -> Program:
    """`name` in a peer's folder. Raises `Skipped` when it has none."""
    packages = folder / PACKAGES
    in_wheels = [*packages.glob(f"*/bin/{name}"), *packages.glob(f"*/{name}")]
    for path in [folder / ROOT / "usr/bin" / name, *sorted(in_wheels)]:
        if path.parent == packages / "bin":
            continue  # a Python script, which starts the program of the same name in the wheel
        if path.is_file() and os.access(path, os.X_OK):
            return Program(str(path), library_path(folder))
    raise Skipped(f"no {name} in {folder}")


def version(found: Program) -> str:
    """The version that `--version` prints, as `7.0.15`. Raises `Skipped` when it does not run."""
    try:
        done = subprocess.run(
            [found.path, "--version"], env={**os.environ, **found.env}, capture_output=True,
            text=True, errors="replace", timeout=_PATIENCE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(f"{found.path} does not run: {error}") from None
    match = re.search(r"\d+\.\d+\.\d+", done.stdout)
    if done.returncode or match is None:
        last_words = f"{done.stdout}{done.stderr}".strip().rpartition("\n")[2]
        raise Skipped(f"{found.path} does not run: {last_words}")
    return match[0]


def versions(*peers: str) -> dict[str, str]:
    """Versions of the packages of `peers`, by distribution. Nothing is imported."""
    paths = [str(folder / PACKAGES) for peer in peers if (folder := installed(peer))]
    return {found.name: found.version for found in metadata.distributions(path=paths)}


def library_path(folder: Path) -> dict[str, str]:
    """`LD_LIBRARY_PATH` for the programs of a peer's folder; empty when it has no libraries."""
    roots = [folder / ROOT / "usr/lib", folder / ROOT / "lib"]
    found = [str(path) for root in roots for path in sorted(root.glob("*-linux-gnu*"))]
    if not found:
        return {}
    if before := os.environ.get("LD_LIBRARY_PATH"):
        found.append(before)
    return {"LD_LIBRARY_PATH": ":".join(found)}


def python_path(peer: str) -> dict[str, str]:
    """`PYTHONPATH` for a Python process of `peer`; empty when this Python has the peer."""
    folder = installed(peer)
    if folder is None:
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": ":".join([*([before] if before else []), str(folder / PACKAGES)])}


def _hint(peer: str) -> str:
    return "" if installed(peer) else "; `make peers` installs it"
