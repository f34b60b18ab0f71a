"""`kvferry doctor --engine`: an engine that computes what the server has, because that is slow."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from remote_server.cli.__main__ import main

Doctor = Callable[[str], tuple[str, str]]

PAGE: dict[str, str] = {}


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(PAGE["text"].encode())

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def engine() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    monkeypatch.setattr("remote_server.cli.checks.doctor.host_findings", lambda: [])

    def run(url: str) -> tuple[str, str]:
        main(["doctor", "--json", "--server", "tcp://127.0.0.1:1", "--engine", url])
        found = json.loads(capsys.readouterr().out)
        (one,) = (each for each in found if each["check"] == "engine")
        return one["verdict"], one["told"]

    return run


def page(found: int, **missed: int) -> str:
    """As an engine prints it, with a label of vLLM's own."""
    lines = ["# TYPE kvferry_hit_blocks counter"]
    lines += [f'kvferry_hit_blocks_total{{engine="0"}} {found}.0']
    lines += ["# TYPE kvferry_missed_blocks counter"]
    for reason, number in missed.items():
        label = f'{{engine="0",reason="{reason}"}}'
        lines += [f"kvferry_missed_blocks_total{label} {number}.0"]
    return "\n".join(lines) + "\n"


def test_hits_that_are_given_up_for_slowness_are_a_note_with_their_reasons(
    engine: str, doctor: Doctor
):
    PAGE["text"] = page(900, lookup_late=80, lookup_paused=20, absent=5_000)
    verdict, text = doctor(engine)
    assert verdict == "note"
    assert "10% of 1,000 blocks" in text and "lookup_late 80, lookup_paused 20" in text
    assert "`patience`" in text and "absent" not in text


def test_an_engine_that_computes_what_no_server_has_is_right(engine: str, doctor: Doctor):
    PAGE["text"] = page(900, lookup_late=1, absent=5_000, break_even=100)
    assert doctor(f"{engine}/metrics")[0] == "ok"


@pytest.mark.parametrize("text", ["", "# TYPE vllm:x gauge\nvllm:x 1.0\n", "<html>"])
def test_a_page_without_our_metrics_is_bad(engine: str, doctor: Doctor, text: str):
    PAGE["text"] = text
    assert doctor(engine)[0] == "bad"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "nonsense://x"])
def test_an_engine_that_is_not_there_is_bad(doctor: Doctor, url: str):
    verdict, text = doctor(url)
    assert verdict == "bad" and url in text
