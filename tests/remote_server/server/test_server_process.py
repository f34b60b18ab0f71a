"""`python -m remote_server` as an operator meets it."""

import os
import pkgutil
import signal
import subprocess
import sys

import pytest
from server_process import PATIENCE_S, cpu_s
from wire_peer import Peer, block

import remote_server
from remote_server.protocol import Blocks

pytestmark = pytest.mark.real_time

COMMAND = [sys.executable, "-m", "remote_server", "--admin", "off"]
FREE_PORT = ["--bind", "tcp://127.0.0.1:*"]


class Process:
    def __init__(self, *flags: str) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *FREE_PORT, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.ready_line = self.popen.stdout.readline()
        self.start_cpu_s = cpu_s(self.popen.pid)
        self.endpoint = self.ready_line.split()[3]

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def ended(self) -> tuple[int, str]:
        _, errors = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, errors


@pytest.fixture
def start():
    processes = []

    def start(*flags: str) -> Process:
        processes.append(Process(*flags))
        return processes[-1]

    yield start
    for process in processes:
        process.popen.kill()
        process.popen.communicate()


def fails_with(status: int, *flags: str) -> str:
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_it_starts_in_under_two_seconds_of_a_core_and_says_where_it_is(start):
    process = start("--memory", "1GiB")
    assert process.start_cpu_s < 2
    assert process.ready_line.startswith("remote_server ready on tcp://127.0.0.1:")
    assert "memory 1.0 GiB in 16 slabs  mover " in process.ready_line
    assert "  epoch " in process.ready_line


def test_what_it_promised_when_ready_it_does(start, context):
    peer = Peer(context, start("--memory", "16MiB").endpoint)
    peer.hello()
    peer.put(range(10))
    assert peer.get(range(10))[1] == [(n, block(n)) for n in range(10)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_with_status_0(start, number):
    process = start("--memory", "16MiB")
    process.signal(number)
    status, errors = process.ended()
    assert status == 0
    assert "draining" in errors
    assert "Traceback" not in errors


def test_the_first_signal_lets_a_stream_finish(start, context):
    limits = ("--drain-timeout-s", "30", "--max-inflight", "1GiB")
    process = start("--memory", "64MiB", *limits)
    reader = Peer(context, process.endpoint, rcvhwm=1)
    reader.hello(block_bytes=1 << 20)
    reader.put(range(16), length=1 << 20)
    ids = [reader.send_get(range(16)) for _ in range(20)]
    reader.receive()
    process.signal(signal.SIGTERM)
    assert "draining" in process.popen.stderr.readline()
    complete = 0
    while complete < len(ids):
        reply, _ = reader.receive()
        complete += isinstance(reply, Blocks) and not reply.more
    assert process.ended()[0] == 0


def test_the_second_signal_leaves_at_once(start, context):
    process = start("--memory", "64MiB", "--drain-timeout-s", "3000")
    reader = Peer(context, process.endpoint, rcvhwm=1)
    reader.hello(block_bytes=1 << 20)
    reader.put(range(16), length=1 << 20)
    for _ in range(20):
        reader.send_get(range(16))  # and never reads, so that draining cannot end
    Peer(context, process.endpoint).stats_once(lambda stats: stats.counters["get_total"] > 0)
    process.signal(signal.SIGTERM)
    assert "draining" in process.popen.stderr.readline()
    assert process.popen.poll() is None
    process.signal(signal.SIGTERM)
    assert process.ended()[0] == 0


def test_nothing_is_left_in_dev_shm_even_after_a_kill(start):
    before = set(os.listdir("/dev/shm"))
    process = start("--memory", "64MiB")
    assert set(os.listdir("/dev/shm")) <= before
    process.signal(signal.SIGKILL)
    process.popen.wait(10)
    assert set(os.listdir("/dev/shm")) <= before


def test_an_address_in_use_is_one_clear_line(start):
    endpoint = start("--memory", "16MiB").endpoint
    errors = fails_with(2, "--bind", endpoint, "--memory", "16MiB", "--admin", "off")
    assert errors.count("\n") == 1
    assert endpoint in errors
    assert "in use" in errors
    assert "choose another port" in errors


def test_an_unknown_flag_is_met_with_the_nearest_known_one():
    assert "unknown flag --memry; did you mean --memory?" in fails_with(2, "--memry", "1GiB")
    assert "unknown flag --mem" in fails_with(2, "--mem", "1GiB"), "no guessing by prefix"


def test_more_memory_than_the_machine_has_names_both_numbers():
    errors = fails_with(2, *FREE_PORT, "--memory", "900000GiB")
    assert "memory: 878.9 TiB requested, but only" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--memory", "lots"], "memory: 'lots' is not a size"),
        (["--bind", "tcp://0.0.0.0:*"], "--insecure"),
        (["--bind", "nowhere"], "bind: 'nowhere': tcp:// in front is missing"),
        (["--bind", "tcp://127.0.0.99x:5000"], "--insecure"),
        (["--insecure", "--bind", "tcp://no.such.host.invalid:5000"], "bind: tcp://no.such"),
        (["--log-level", "loud"], "log_level: 'loud'"),
    ],
)
def test_an_operators_mistake_is_one_line_and_no_traceback(flags, complaint):
    errors = fails_with(2, *flags)
    assert complaint in errors
    assert errors.count("\n") == 1


def test_help_names_every_flag_with_its_default():
    text = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True).stdout
    for expected in ("--memory SIZE", "1GiB", "--bind", "5757", "--drain-timeout-s", "--insecure",
                     "--no-shared-memory"):  # fmt: skip
        assert expected in text


def test_importing_all_of_it_loads_neither_torch_nor_vllm():
    found = pkgutil.walk_packages(remote_server.__path__, "remote_server.")
    # A library for ctypes has the suffix of a module, and is none.
    others = ("__main__", ".libkvferry")
    names = [module.name for module in found if not module.name.endswith(others)]
    assert "remote_server.server.server" in names
    program = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'kv_connector'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
