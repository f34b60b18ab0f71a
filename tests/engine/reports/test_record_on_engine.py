"""What an engine would ask of a cache server, recorded without one."""

import json
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from cluster import (
    BLOCK,
    PATIENT,
    ROW_BYTES,
    SMALL_ARGS,
    SMALL_POOL_ROWS,
    QuickEngine,
    connector,
    running,
)

from examples.processes import free_port
from examples.tiny_model import prompt_tokens
from remote_server.cli.__main__ import main
from remote_server.cli.traces import record

pytestmark = [pytest.mark.whole, pytest.mark.timeout(1800)]


def test_each_prompt_is_one_lookup_and_each_answer_is_in_puts(
    model: Path, logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stop = threading.Event()
    monkeypatch.setattr(record, "_stopped_by_signals", lambda: nullcontext(stop))
    address, path = f"127.0.0.1:{free_port()}", tmp_path / "trace.jsonl"
    command = threading.Thread(target=main, args=(["record", str(path), "--listen", address],))
    command.start()
    given = connector(f"tcp://{address}", cpu_pool=SMALL_POOL_ROWS * ROW_BYTES, **PATIENT)
    engine = QuickEngine(model, connector=given, args=SMALL_ARGS, log=logs / "recorded.log")
    first, other = prompt_tokens(10 * BLOCK + 3, seed=9100), prompt_tokens(3 * BLOCK, seed=9200)
    try:
        with running(engine):
            engine.when_ready()
            engine.ask(first, 2 * BLOCK + 2)
            engine.settle()
            engine.ask(first + other, 1)  # the first ten blocks are in the engine
            engine.leave_to_server()
            engine.ask(first, 1)
            engine.settle()
    finally:
        stop.set()
        command.join(60)
    _, *lines, last = map(json.loads, path.read_text().splitlines())
    assert last == {"end": True, "requests": len(lines), "lost": 0}
    lookups = [line for line in lines if line["type"] == "lookup"]
    shown = [(line["input_length"] // BLOCK, len(line["hash_ids"])) for line in lookups]
    assert shown == [(10, 10), (13, 3), (10, 10)]
    assert lookups[0]["hash_ids"] == lookups[2]["hash_ids"], "the same prompt has the same ids"
    assert not any(line["found"] for line in lines)
    answer = [line for line in lines if line["type"] == "put"]
    assert sum(len(line["hash_ids"]) for line in answer) == 2
    assert [line["input_length"] // BLOCK for line in answer] in ([11, 12], [12])
