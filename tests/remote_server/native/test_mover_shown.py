"""Of a server is shown what moves its blocks: in `/metrics`, `stats` and `doctor`. Its first line
is in `test_server_process.py`."""

import json
import urllib.request

import pytest
from admin_http import served

from remote_server.cli.__main__ import main
from remote_server.native.mover import what_moves

pytestmark = pytest.mark.real_time


@pytest.mark.parametrize("variable", ["", "python"])
def test_an_operator_sees_what_moves_the_blocks_of_a_server(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Whichever this host has, and the one in Python."""
    monkeypatch.setenv("KVFERRY_MOVER", variable)
    mover = what_moves()
    assert not variable or mover == "Python: KVFERRY_MOVER=python"
    with served() as (server, admin):
        with urllib.request.urlopen(f"{admin.url}/metrics", timeout=60) as answer:
            (info,) = [line for line in answer if line.startswith(b"kvferry_server_info{")]
        assert f'mover="{mover}"' in info.decode()

        assert main(["stats", "--server", server.endpoint]) == 0
        first_line = capsys.readouterr().out.splitlines()[0]
        assert first_line.partition("  lanes ")[0].endswith(f"  mover {mover}")

        assert main(["doctor", "--json", "--server", server.endpoint]) in (0, 1)
    findings = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    verdict = "ok" if mover.startswith("native") else "note"
    for check in ("mover", "server's mover"):
        assert findings[check]["verdict"] == verdict
        assert findings[check]["told"].startswith(mover)
