"""A rolling upgrade with real processes: one server of two is drained and started again on its
disk, and then drained into the bucket, while the other one goes on."""

import json
from collections.abc import Callable, Iterator

import pytest
from admin_http import write_token
from bucket_helpers import folder_url, hello
from test_bucket_drain import PROMPTS, ROWS, prompt, put_prompts, stretch
from test_server_process import Process
from wire_peer import Peer

from examples.processes import free_port
from remote_server.cli.__main__ import main

pytestmark = pytest.mark.real_time

WHOLE_PACKS = ROWS // 8 * 8
"""Rows of a prompt in complete packs."""

OWN, OTHERS = range(PROMPTS), range(PROMPTS, 2 * PROMPTS)


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[[int], Process]]:
    """Start the server of a number, each time with the same settings."""
    processes: list[Process] = []
    ports = [free_port() for _ in range(2)]
    token, bucket = write_token(tmp_path), folder_url(tmp_path)

    def start(number: int) -> Process:
        processes.append(Process(
            "--bind", f"tcp://127.0.0.1:{ports[number]}", "--memory", "64MiB", "--no-populate",
            "--disk", str(tmp_path / f"disk-{number}"), "--disk-bytes", "160MiB",
            "--disk-write-rate", "0", "--admin", "http://127.0.0.1:*",
            "--admin-token-file", token, "--bucket", bucket,
        ))  # fmt: skip
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def drain(tmp_path, capsys) -> Callable[..., dict]:
    """What `kvferry drain` prints."""

    def drain(process: Process, *flags: str) -> dict:
        admin, token = process.ready_line.split()[-1], str(tmp_path / "token")
        assert main(["drain", admin, *flags, "--json", "--admin-token-file", token]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return json.loads(printed.out)

    return drain


def readable(peer: Peer, prompts: range) -> int:
    """The rows of these prompts that can be read now."""
    return sum(peer.lookup(prompt(one), chain=stretch(0, ROWS)).prefix for one in prompts)


def test_a_drained_server_has_its_blocks_again_and_another_finds_them_in_the_bucket(
    start, drain, context
):
    """It is drained right after the last put: the drain waits for what the disk has not got."""
    first, second = start(0), start(1)
    other = hello(Peer(context, second.endpoint))
    put_prompts(other, OTHERS)
    put_prompts(hello(Peer(context, first.endpoint)), OWN)
    assert drain(first) == {"draining": True, "ends_within_s": 5.0}
    assert first.ended()[0] == 0
    assert readable(other, OTHERS) == PROMPTS * ROWS
    first = start(0)
    peer = hello(Peer(context, first.endpoint))
    peer.stats_once(lambda _: readable(peer, OWN) == PROMPTS * ROWS)
    assert drain(first, "--to-bucket")["left"] == 0
    assert readable(peer, OWN) == PROMPTS * ROWS, "it serves reads"
    first.signal(15)
    assert first.ended()[0] == 0
    other.stats_once(lambda _: readable(other, OWN) == PROMPTS * WHOLE_PACKS)
