"""The two programs, from their flags to their last line, against a server that is scripted."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai_fake import OpenAIFake, chunk, usage

from benchmarks.harness.record import Record
from examples import local_stack, make_dummy_inputs, router_demo, speed_test, stress_test
from examples.engine import VllmServer
from examples.local_stack import LocalStack, Sizes, TooLarge
from examples.processes import LoggedProcess, RemoteServer, StartFailed

pytestmark = pytest.mark.real_time

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DONE = b"data: [DONE]\n\n"


def answer(prompt: int, cached: int | None) -> list[object]:
    return [chunk("a"), usage(prompt, cached), DONE]


@pytest.fixture
def server() -> Iterator[OpenAIFake]:
    with OpenAIFake().running() as fake:
        yield fake


BOTH = (speed_test, stress_test)


@pytest.mark.parametrize(
    ("programs", "flags", "message"),
    [
        (BOTH, [], "no target: give --url http://127.0.0.1:8000 for a running server, or --start"),
        (BOTH, ["--url", "http://x", "--start"], "not both"),
        (BOTH, ["--start", "--model", "m"], "--model goes with --url, not with --start"),
        (BOTH, ["--start", "--cache-server", "tcp://x:1"], "--cache-server goes with --url"),
        (BOTH, ["--url", "http://x", "--api-key-env", "NOT_SET"], "NOT_SET: no such environment"),
        (BOTH, ["--url", "http://x", "--filename", "not-there"], "no such file; make one"),
        (BOTH, ["--start", "--length", "33"], "--length 33: not whole blocks of 32 tokens"),
        (BOTH[1:], ["--start", "--n", "1"], "--n 1: a triangle needs at least 2 documents"),
        (BOTH[1:], ["--start", "--length", "8192"], "the model 'wide' takes at most 8160"),
        (BOTH[1:], ["--start", "--plot", "x.gif"], "--plot x.gif: a picture is .svg or .png"),
        (BOTH[1:], ["--start", "--json", "no/x.json"], "there is no folder no; make it"),
        (BOTH[1:], ["--start", "--filename", "x"], "--filename goes with --url"),
    ],
)
def test_wrong_flags_are_one_line_and_start_nothing(programs, flags, message, capsys):
    for program in programs:
        assert program.main(flags) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("program", BOTH)
def test_an_absent_server_or_cache_server_is_one_line(program, server, capsys, monkeypatch):
    assert program.main(["--url", "http://127.0.0.1:9"]) == 1
    out, err = capsys.readouterr()
    assert "cannot be reached" in err and "--start" in err and err.count("\n") == 1 and out == ""
    monkeypatch.setattr("examples.target._REACH_S", 0.05)
    assert program.main(["--url", server.url, "--cache-server", "tcp://127.0.0.1:9"]) == 1
    out, err = capsys.readouterr()
    assert "--cache-server tcp://127.0.0.1:9: nothing answers" in err
    assert err.count("\n") == 1 and out == "" and not server.bodies


def test_speed_test_asks_every_prompt_as_often_as_said(server, tmp_path, capsys):
    path = tmp_path / "dummy.jsonl"
    prompts = make_dummy_inputs.make_dummy_inputs(2, 64)
    make_dummy_inputs.write(prompts, path)
    server.answers = [answer(77, 0), answer(77, 0), answer(77, 64), answer(77, 32)]
    assert speed_test.main(["--url", server.url, "--filename", str(path), "--pause", "0"]) == 0
    assert [body["prompt"] for body in server.bodies] == prompts * 2
    lines = capsys.readouterr().out.splitlines()
    found = [re.sub(r"\d+\.\d+ s +\d+\.\d+x", "TIME", line).split() for line in lines[2:6]]
    assert [" ".join(words) for words in found] == [
        "1 1st time 77 TIME 0 77 computed",
        "2 1st time 77 TIME 0 77 computed",
        "1 again 77 TIME 64 64 cached, 13 computed",
        "2 again 77 TIME 32 45 computed, 32 cached",
    ]
    assert lines[-1].startswith("next: all levels side by side")


def test_stress_test_asks_for_the_triangle_and_writes_what_it_printed(server, tmp_path, capsys):
    record, picture = tmp_path / "r.json", tmp_path / "p.svg"
    server.answers = [answer(77, 0), answer(77, 64), answer(77, 0)]
    flags = ["--url", server.url, "--n", "2", "--length", "64", "--pause", "0"]
    flags += ["--json", str(record), "--plot", str(picture)]
    assert stress_test.main(flags) == 0
    one, other = make_dummy_inputs.make_dummy_inputs(2, 64)
    assert [body["prompt"] for body in server.bodies] == [one, one, other]
    printed = capsys.readouterr().out
    assert re.search(r"^ +1 +\d\.\d+ c\n +2 +\d\.\d+ h +\d\.\d+ c\n", printed, re.MULTILINE)
    assert printed.splitlines()[-1].startswith("next: --cache-server")
    written = Record.read(record)
    assert [row.operation for row in written.rows] == [
        "first token: computed", "first token: cached",
    ]  # fmt: skip
    assert written.parameters["model"] == "the-model" and not written.interrupted
    assert picture.read_text().startswith("<?xml")


def test_what_was_measured_before_a_failure_is_printed_and_written(server, tmp_path, capsys):
    record = tmp_path / "r.json"
    server.answers = [answer(77, 0), answer(77, 64), [chunk("a"), server.BREAK]]
    flags = ["--url", server.url, "--n", "2", "--length", "64", "--pause", "0"]
    assert stress_test.main([*flags, "--json", str(record)]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^ +2 +\d\.\d+ h +-$", out, re.MULTILINE)
    assert "broke off in the middle" in err.splitlines()[-1]
    assert len(Record.read(record).figures) == 2


def test_an_interrupted_triangle_keeps_what_it_has(server, tmp_path):
    record = tmp_path / "r.json"
    server.answers = [answer(77, 0), [chunk(), server.HOLD]]
    command = [sys.executable, "-m", "examples.stress_test", "--url", server.url, "--n", "2"]
    command += ["--length", "64", "--pause", "0", "--json", str(record)]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.holding.wait(60)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert re.search(r"^ +1 +\d\.\d+ c\n +2 +- +-$", out, re.MULTILINE)
    assert err.splitlines()[-1].startswith("interrupted; nothing that was started runs")
    assert json.loads(record.read_text())["interrupted"] is True


def test_sizes_in_documents_hold_so_many_and_less_than_one_more():
    sizes = Sizes.in_documents(8000, "wide", pool=2, memory=3, disk=6)
    block = 32 * 12288  # bytes: 12 layers, keys and values, 4 heads of 64, two bytes each
    assert sizes.pool_bytes == 500 * block
    assert 750 * block <= sizes.memory_bytes < 760 * block
    assert sizes.memory_bytes % (16 * block) == 0  # no slab has a part of a slot left over
    assert sizes.disk_bytes > 1500 * (block + 4096)
    assert (sizes.engine_blocks, sizes.max_model_len) == (252, 8032)
    with pytest.raises(TooLarge, match="at most 8160"):
        Sizes.in_documents(8192, "wide", pool=2, memory=3, disk=6)


@pytest.mark.parametrize("gpus", [0, 1])
def test_an_engine_wants_a_part_of_a_gpu_only_where_one_is(tmp_path, monkeypatch, gpus):
    monkeypatch.setattr("examples.engine.num_gpus", lambda: gpus)
    flags = ["--gpu-memory-utilization", "0.5"]
    words = VllmServer("m", args=flags, log=tmp_path / "log").command
    assert words.count(flags[0]) == 1 + gpus
    assert words[-2:] == flags, "the caller's own come last"


class EngineThatFails(LoggedProcess):
    """In the place of vLLM's, which takes half a minute to fail."""

    name = "no-engine"

    def __init__(self, *_args: object, log: Path, **_more: object) -> None:
        super().__init__(["sh", "-c", "echo no memory; exit 1"], log=log)

    def is_ready(self) -> bool:
        return False


def test_an_engine_that_does_not_start_leaves_neither_server_nor_disk(model, tmp_path, monkeypatch):
    servers: list[RemoteServer] = []

    class Watched(RemoteServer):
        def start(self) -> "Watched":
            servers.append(self)
            return super().start()

    monkeypatch.setattr(local_stack, "VllmServer", EngineThatFails)
    monkeypatch.setattr(local_stack, "RemoteServer", Watched)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    stack = LocalStack(
        "small", Sizes(memory_bytes=1 << 24, disk_bytes=1 << 26), model.parent, tmp_path
    )
    with pytest.raises(StartFailed, match="no memory"), stack:
        raise AssertionError("it started")
    assert len(servers) == 1 and not servers[0].running
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("length", ["0", "100", "8160", "100000", "-32", "x"])
def test_a_document_that_the_model_or_its_blocks_do_not_take_is_refused_in_a_line(
    length: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as refused:
        router_demo.main([f"--length={length}"])
    assert refused.value.code == 2
    assert f"{length}: a multiple of 32, at most 8128" in capsys.readouterr().err
