"""A rolling upgrade with real processes: one server of three is drained and started again on its
disk, with and without a bucket, while the others go on."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from admin_http import write_token
from bucket_helpers import folder_url, hello
from server_process import PATIENCE_S
from test_bucket_drain import PROMPTS, ROWS, prompt, put_prompts, stretch
from test_server_process import Process
from wire_peer import Peer

from examples.processes import free_port

pytestmark = pytest.mark.real_time

SERVERS = range(3)
DRAINED = 1
WHOLE_PACKS = ROWS // 8 * 8
"""Rows of a prompt in complete packs."""

Start = Callable[[int], Process]


@pytest.fixture
def begin(tmp_path) -> Iterator[Callable[..., Start]]:
    """A function that starts the server of a number, each time with the same settings."""
    processes: list[Process] = []
    ports = [free_port() for _ in SERVERS]
    token = write_token(tmp_path)

    def begin(*flags: str) -> Start:
        def start(number: int) -> Process:
            processes.append(Process(
                "--bind", f"tcp://127.0.0.1:{ports[number]}", "--memory", "64MiB", "--no-populate",
                "--disk", str(tmp_path / f"disk-{number}"), "--disk-bytes", "160MiB",
                "--disk-write-rate", "0", "--admin", "http://127.0.0.1:*",
                "--admin-token-file", token, *flags,
            ))  # fmt: skip
            return processes[-1]

        return start

    yield begin
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


def drain(process: Process, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    admin = process.ready_line.split()[-1]
    command = [sys.executable, "-m", "remote_server.cli", "drain", admin, *flags]
    return subprocess.run([*command, "--admin-token-file", str(folder / "token")], text=True,
                          capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip


def own_prompts(number: int) -> range:
    return range(number * PROMPTS, (number + 1) * PROMPTS)


def readable(peer: Peer, prompts: range) -> int:
    """The rows of these prompts that can be read now."""
    return sum(peer.lookup(prompt(one), chain=stretch(0, ROWS)).prefix for one in prompts)


def filled(start: Start, context) -> tuple[list[Process], list[Peer]]:
    """Three servers, each with prompts of its own, and a peer of each."""
    servers = [start(number) for number in SERVERS]
    peers = [hello(Peer(context, server.endpoint)) for server in servers]
    for number, peer in enumerate(peers):
        put_prompts(peer, own_prompts(number))
    return servers, peers


def has_its_blocks_again(process: Process, context) -> None:
    peer = hello(Peer(context, process.endpoint))
    peer.stats_once(lambda _: readable(peer, own_prompts(DRAINED)) == PROMPTS * ROWS)


def test_a_drained_server_ends_and_has_its_blocks_again_on_its_disk(begin, context, tmp_path):
    """It is drained right after the last put: the drain waits for what the disk has not got."""
    start = begin()
    servers, peers = filled(start, context)
    done = drain(servers[DRAINED], tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"draining": True, "ends_within_s": 5.0}
    assert servers[DRAINED].ended()[0] == 0
    for number in (0, 2):
        assert readable(peers[number], own_prompts(number)) == PROMPTS * ROWS
    has_its_blocks_again(start(DRAINED), context)


def test_a_server_that_drained_into_the_bucket_is_replaced_by_another_meanwhile(
    begin, context, tmp_path
):
    start = begin("--bucket", folder_url(tmp_path))
    servers, peers = filled(start, context)
    done = drain(servers[DRAINED], tmp_path, "--to-bucket", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["left"] == 0
    assert readable(peers[DRAINED], own_prompts(DRAINED)) == PROMPTS * ROWS, "it serves reads"
    servers[DRAINED].signal(15)
    assert servers[DRAINED].ended()[0] == 0
    other = peers[0]
    for one in own_prompts(DRAINED):
        other.lookup(prompt(one), chain=stretch(0, ROWS))
    expected = PROMPTS * WHOLE_PACKS
    other.stats_once(lambda _: readable(other, own_prompts(DRAINED)) == expected)
    has_its_blocks_again(start(DRAINED), context)
