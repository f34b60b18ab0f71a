"""Of a server is shown what moves its blocks: in its first line, `/metrics`, `stats`, `doctor`."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from server_process import PATIENCE_S

from remote_server.cli.__main__ import main
from remote_server.native.mover import what_moves

pytestmark = pytest.mark.real_time

COMMAND = [sys.executable, "-m", "remote_server", "--memory", "16MiB", "--bind", "tcp://127.0.0.1:*",
           "--admin", "http://127.0.0.1:*"]  # fmt: skip


@pytest.fixture(params=["", pytest.param("python", marks=pytest.mark.whole)])
def mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whichever this host has, and the one in Python."""
    monkeypatch.setenv("KVFERRY_MOVER", request.param)
    expected = what_moves()
    assert not request.param or expected == "Python: KVFERRY_MOVER=python"
    return expected


@pytest.fixture
def first_line(mover: str) -> Iterator[str]:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def test_an_operator_sees_what_moves_the_blocks_of_a_server(
    mover: str, first_line: str, capsys: pytest.CaptureFixture[str]
):
    assert f"  mover {mover}  lanes " in first_line
    found = re.search(r"ready on (\S+).* admin (\S+)", first_line)
    assert found is not None, first_line
    server, admin = found.groups()

    with urllib.request.urlopen(f"{admin}/metrics", timeout=PATIENCE_S) as answer:
        (info,) = [line for line in answer if line.startswith(b"kvferry_server_info{")]
    assert f'mover="{mover}"' in info.decode()

    assert main(["stats", "--server", server]) == 0
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .partition("  lanes ")[0]
        .endswith(f"  mover {mover}")
    )

    assert main(["doctor", "--json", "--server", server]) in (0, 1)
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    verdict = "ok" if mover.startswith("native") else "note"
    for check in ("mover", "server's mover"):
        assert findings[check]["verdict"] == verdict
        assert findings[check]["told"].startswith(mover)
