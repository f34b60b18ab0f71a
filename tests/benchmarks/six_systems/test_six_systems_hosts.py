"""Six systems over several hosts: what starts them, what they measure together, and resumption."""

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import origin
from benchmarks.harness.journal import SUFFIX, Journal
from benchmarks.harness.runner import Skipped
from benchmarks.six_systems import __main__ as six
from benchmarks.six_systems import flags
from benchmarks.six_systems.hosts import launch, nodes
from benchmarks.six_systems.systems import SharedMap

SHORT = ["--total", "64KiB", "--block-bytes", "8KiB", "--trials", "2", "--warm-ups", "1",
         "--no-shared-prefix", "--latency", "5"]  # fmt: skip
LOCAL = ["--hosts", "a,b", "--launch", "local"]


def run(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    file, folder = tmp_path / "record.json", tmp_path / "disk"
    folder.mkdir(exist_ok=True)
    given = [*SHORT, *arguments, "--directory", str(folder), "--json", str(file)]
    assert six.main(given) == status
    assert [*folder.iterdir()] == [], "nothing stays in the directory"
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def figures_of(record: dict[str, Any], system: str, name: str) -> dict[str, float]:
    (found,) = (
        figure["values"] for figure in record["figures"]
        if figure["transport"] == system and figure["name"].startswith(name)
    )  # fmt: skip
    values: dict[str, float] = found
    return values


@pytest.mark.parametrize(
    "how", ["ssh", "srun", "local", "env A=1 ssh -p 2222 user@{host} {command}"]
)
@pytest.mark.parametrize("folder", ["/scratch", "/tmp/a b'c\"d", "/tmp/$HOME;rm"])
def test_each_line_starts_the_clients_of_one_host_whatever_the_folder(how, folder, capsys):
    arguments = ["--hosts", "n1,n2,n3", "--launch", how, "--address", "10.0.0.1", "--port", "4711",
                 "--directory", folder, "--print-launch"]  # fmt: skip
    assert six.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    for number, line in enumerate(lines):
        words = shlex.split(line)
        name = f"n{number + 1}"
        assert (name in line) == (how != "local")
        if how == "srun":
            assert words[:4] == ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}"]
        if how == "ssh":
            assert words[:2] == ["ssh", "-o"] and words[-2] == name
        *folder_words, program, _, module = shlex.split(words[-1])[:7]
        assert folder_words[:1] + folder_words[2:] == ["cd", "&&", "exec"] and program
        assert module == launch.MODULE
        options = shlex.split(words[-1])[7:]
        assert options == ["--connect", "10.0.0.1:4711", "--number", f"{number}",
                           "--directory", folder]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hosts", "a,,b"], ["--hosts", "a,a"], ["--hosts", "-oProxyCommand=x"],
        ["--hosts", "a", "--launch", "rsh {host}"], ["--print-launch"], ["--resume"],
        ["--hosts", "a", "--print-launch"],
    ],
)  # fmt: skip
def test_hosts_that_cannot_be_meant_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        six.main(arguments)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def fake_launcher(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """A program of that name on the PATH that runs its last words here."""
    folder.mkdir()
    program = folder / name
    program.write_text(f"#!/bin/sh\nfor word; do last=$word; done\n{last}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("how", ["ssh", "srun", "local"])
def test_two_hosts_take_each_step_together_and_each_has_its_own_figures(
    how, tmp_path, monkeypatch, capsys
):
    if how != "local":
        fake_launcher(tmp_path / "bin", how, monkeypatch, 'exec sh -c "$last"')
    arguments = ["--hosts", "a,b", "--launch", how, "--address", "127.0.0.1", "--processes", "2"]
    record = run(tmp_path, *arguments, "--systems", "files, fsync", "kvferry, tcp, no disk", "PDC")
    assert record["parameters"]["nodes"] == 1, "two names of one machine"
    assert [host["name"] for host in record["parameters"]["hosts"]] == ["host 1", "host 2"]
    assert "--hosts host1,host2" in record["command"]
    assert "a,b" not in json.dumps(record).replace("a,b,c", "")
    rows = {(row["transport"], row["operation"]): row for row in record["rows"]}
    for system in ("files, fsync", "kvferry, tcp, no disk"):
        for operation in (six.WRITE, six.HOT):
            row = rows[system, operation]
            assert row["model"] == "2 hosts, 2 processes each, 2 x 8.0 KiB each"
            assert row["bytes"] == 64 << 10 and len(row["values"]) == 2, row
            own = figures_of(record, system, f"{operation}, of each host")
            assert own.keys() == {"host 1", "host 2"} and min(own.values()) > 0
            assert row["gb_per_s"] > 0
            late = figures_of(record, system, f"{operation}, one block at a time")
            assert [*late.values()] == sorted(late.values()) and late.keys() == {
                "p50", "p90", "p99", "p100"
            }  # fmt: skip
    assert "host 1: PDC has to be built" in rows["PDC", six.WRITE]["skipped"]
    said = capsys.readouterr().out
    assert "of 2 hosts x 2 processes together" in said and "write p50, p99 ms" in said


@pytest.mark.parametrize("how", ["ssh", "srun"])
def test_without_the_program_that_starts_them_each_row_is_skipped_with_its_words(
    how, tmp_path, monkeypatch
):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    record = run(tmp_path, "--hosts", "a,b", "--launch", how, "--systems", "files", "HDF5")
    assert {row["skipped"] for row in record["rows"]} == {
        f"no {how} on the PATH, which starts the client of a host"
    }
    assert {row["transport"] for row in record["rows"]} == {"files", "files, fsync", "HDF5"}


def test_a_host_that_cannot_be_reached_is_a_reason_with_its_last_words(tmp_path, monkeypatch):
    last = 'case "$*" in *" b "*) echo no route to it >&2; exit 255;; esac; exec sh -c "$last"'
    fake_launcher(tmp_path / "bin", "ssh", monkeypatch, last)
    record = run(tmp_path, "--hosts", "a,b", "--address", "127.0.0.1", "--systems", "HDF5")
    assert {row["skipped"] for row in record["rows"]} == {"host 2: ended with 255: no route to it"}


def test_a_process_without_the_key_gets_no_step():
    """The key is in no command line: who reads one and connects has it not."""
    arguments = flags.parser("m").parse_args(LOCAL)
    plan = flags.plan_of(arguments)
    assert plan is not None
    plan = plan._replace(how="sh -c 'echo 00ff | sh -c \"$0\"' {command}")
    with pytest.raises(Skipped, match="AuthenticationError"), nodes.running(plan):
        pass


def without_times(value: Any) -> Any:
    """A record with the numbers of its times, and what the machine did, left out."""
    if isinstance(value, dict):
        return {
            key: without_times(one) for key, one in value.items()
            if key not in ("started", "stolen_percent", "interrupted")
        }  # fmt: skip
    if isinstance(value, list):
        return [without_times(one) for one in value]
    return 0 if isinstance(value, float) else value


@pytest.mark.parametrize("hosts", [[], LOCAL], ids=["here", "two hosts"])
def test_a_run_after_ctrl_c_goes_on_and_its_record_is_that_of_a_run_in_one_piece(
    hosts, tmp_path, monkeypatch, capsys
):
    arguments = [*hosts, "--systems", "shared-memory map", "files, fsync"]
    monkeypatch.setattr(origin, "source", lambda: {"commit": "1", "clean": True})
    whole = run(tmp_path, *arguments)
    taken: list[str] = []
    real = Journal.put

    def put(self: Any, key: tuple[Any, ...], value: Any) -> None:
        real(self, key, value)
        taken.append(str(key))
        if len(taken) == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "put", put)
    run(tmp_path, *arguments, status=130)
    monkeypatch.setattr(Journal, "put", real)
    assert (tmp_path / f"record.json{SUFFIX}").exists()
    writes: list[int] = []
    write = SharedMap.write
    monkeypatch.setattr(SharedMap, "write", lambda self: (writes.append(1), write(self))[1])
    resumed = run(tmp_path, *arguments, "--resume")
    assert "9 measurements are kept" in capsys.readouterr().err
    assert without_times(resumed) == without_times(whole)
    assert not (tmp_path / f"record.json{SUFFIX}").exists()
