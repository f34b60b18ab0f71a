"""Peers: installed into a folder of their own, found there, and never in the way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.runner import Skipped
from benchmarks.peers import CannotInstall, Peer, Recipe
from examples.processes import REPOSITORY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of peers that this process uses, with nothing on its PATH."""
    monkeypatch.setenv(peer_folder.VARIABLE, str(tmp_path / "peers"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    return tmp_path / "peers"


def stand_in(folder: Path, peer: str, path: str, text: str, *, whole: bool = True) -> Path:
    """A file of a peer's folder, executable; without `whole` its installation was cut short."""
    file = folder / peer / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    if whole:
        (folder / peer / peer_folder.STAMP).write_text("recipe\n1.0.0\n")
    return file


def test_a_package_of_a_peer_is_imported_and_one_of_this_python_is_not_replaced(folder):
    stand_in(folder, "standin", "packages/kvferry_standin.py", "VALUE = 7\n")
    stand_in(folder, "standin", "packages/msgspec.py", "raise AssertionError('shadowed')\n")
    assert peer_folder.package("standin", "kvferry_standin").VALUE == 7
    peer_folder.use("standin", "standin")
    assert sys.path.count(str(folder / "standin/packages")) == 1
    sys.modules.pop("kvferry_standin")
    done = subprocess.run(
        [sys.executable, "-c", "import kvferry_standin as s; print(s.VALUE)"],
        env={**os.environ, **peer_folder.python_path("standin")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "7\n"


def test_what_is_missing_names_the_command_that_installs_it(folder):
    with pytest.raises(Skipped, match=r"cannot import nosuch: .*; `make peers` installs it"):
        peer_folder.package("nosuch", "nosuch.inner")
    with pytest.raises(Skipped, match=r"no nosuchd on the PATH; `make peers` installs it"):
        peer_folder.program("nosuch", "nosuchd")
    assert peer_folder.python_path("nosuch") == {}


def test_a_program_runs_with_the_libraries_that_came_with_it(folder, monkeypatch):
    stand_in(folder, "daemon", "root/usr/lib/x86_64-linux-gnu/libx.so", "")
    path = stand_in(folder, "daemon", "root/usr/bin/daemond", "#!/bin/sh\necho v=1.2.3\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    found = peer_folder.program("daemon", "daemond")
    assert found.path == str(path)
    libraries = folder / "daemon/root/usr/lib/x86_64-linux-gnu"
    assert found.env == {"LD_LIBRARY_PATH": f"{libraries}:/before"}
    assert peers.run_version("daemond")(folder / "daemon") == "1.2.3"
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    assert peer_folder.program("daemon", "daemond") == ("/usr/bin/daemond", {})


def wheel_stub(monkeypatch: pytest.MonkeyPatch, *broken: str) -> list[str]:
    """In pip's place: writes a module for each wheel. Returns the wheels, as they are installed."""
    done: list[str] = []

    def install(wheels: tuple[str, ...], target: Path) -> None:
        for wheel in wheels:
            if wheel in broken:
                raise CannotInstall(f"no wheel of {wheel} for this machine")
            target.mkdir(parents=True, exist_ok=True)
            (target / f"{wheel}.py").write_text("")
            done.append(wheel)

    monkeypatch.setattr(peers, "_install_wheels", install)
    return done


def test_a_recipe_that_fails_is_followed_by_the_next_and_a_peer_that_is_there_is_left(
    tmp_path, monkeypatch
):
    done = wheel_stub(monkeypatch, "newer")
    peer = Peer("peer", [Recipe(("newer",)), Recipe(("older",))], lambda _: "1.0.0")
    assert "installed in 0 s: older" in peers.install(peer, tmp_path)
    assert "1.0.0" in peers.install(peer, tmp_path) and done == ["older"]
    assert [*tmp_path.iterdir()] == [tmp_path / "peer"], "nothing half-made stays"
    newer = Peer("peer", [Recipe(("newest",))], lambda _: "2.0.0")
    assert "2.0.0" in peers.install(newer, tmp_path), "another recipe replaces it"
    assert not (tmp_path / "peer/packages/older.py").exists()


def test_a_peer_that_does_not_run_leaves_what_was_there_before(tmp_path, monkeypatch):
    wheel_stub(monkeypatch)
    peers.install(Peer("peer", [Recipe(("old",))], lambda _: "1.0.0"), tmp_path)

    def fails(_: Path) -> str:
        raise CannotInstall("Illegal instruction")

    with pytest.raises(CannotInstall, match=r"^Illegal instruction$"):
        peers.install(Peer("peer", [Recipe(("new",))], fails), tmp_path)
    assert (tmp_path / "peer/packages/old.py").exists()


def test_one_peer_that_cannot_be_had_is_one_line_and_the_others_are_installed(
    tmp_path, monkeypatch, capsys
):
    wheel_stub(monkeypatch, "h5py==3.16.0")
    everything = [peer._replace(recipes=[Recipe(peer.recipes[-1].wheels)], check=lambda _: "1.2.3")
                  for peer in peers.PEERS if peer.recipes[-1].wheels]  # fmt: skip
    monkeypatch.setattr(peers, "PEERS", everything)
    assert peers.main(["--into", str(tmp_path), "--only", "h5py,redis-py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 of 2  redis-py  1.2.3         installed in 0 s")
    assert lines[1] == "2 of 2  h5py      not installed: no wheel of h5py==3.16.0 for this machine"
    assert f"export {peer_folder.VARIABLE}={tmp_path}" in lines
    assert "  python -m benchmarks.six_systems" in lines
    assert peers.main(["--into", str(tmp_path), "--only", "h5py"]) == 1


def test_versions_are_pinned_and_the_folder_is_not_part_of_the_repository():
    for peer in peers.PEERS:
        for recipe in peer.recipes:
            assert all("==" in wheel for wheel in recipe.wheels), peer.name
    assert ".peers/" in (REPOSITORY / ".gitignore").read_text().split()
    assert "@$(PYTHON_VENV) -m benchmarks.peers $(ARGS)" in (REPOSITORY / "Makefile").read_text()
