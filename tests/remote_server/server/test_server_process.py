"""`python -m remote_server` as an operator meets it."""

import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import PATIENCE_S
from wire_peer import Peer, block

import remote_server
from remote_server.cli.__main__ import main
from remote_server.native.mover import what_moves

pytestmark = pytest.mark.real_time

COMMAND = [sys.executable, "-m", "remote_server", "--admin", "off"]
FREE_PORT = ["--bind", "tcp://127.0.0.1:*"]


class Process:
    def __init__(self, *flags: str) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *FREE_PORT, *flags],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.ready_line = self.popen.stdout.readline()
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


def test_it_says_where_it_is_serves_at_once_and_ends_by_a_signal_with_status_0(start, context):
    process = start("--memory", "1GiB")
    assert process.ready_line.startswith("kvferry ready on tcp://127.0.0.1:")
    assert f"memory 1.0 GiB in 16 slabs  mover {what_moves()}  lanes " in process.ready_line
    assert "  epoch " in process.ready_line
    peer = Peer(context, process.endpoint)
    peer.hello()
    peer.put(range(10))
    assert peer.get(range(10))[1] == [(n, block(n)) for n in range(10)]
    maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
    assert "/memfd:" in maps and "/dev/shm/" not in maps, "a kill would leave a file there"
    process.signal(signal.SIGTERM)
    status, errors = process.ended()
    assert status == 0
    assert "draining" in errors
    assert "Traceback" not in errors


def test_the_first_signal_waits_for_streams_and_the_second_leaves_at_once(start, context):
    process = start("--memory", "64MiB", "--drain-timeout-s", "3000")
    reader = Peer(context, process.endpoint, rcvhwm=1)
    reader.hello(block_bytes=1 << 20)
    reader.put(range(16), length=1 << 20)
    for _ in range(20):
        reader.send_get(range(16))  # and never reads, so that draining cannot end
    Peer(context, process.endpoint).stats_once(lambda stats: stats.counters["get_total"] > 0)
    process.signal(signal.SIGTERM)
    assert any("draining" in line for line in process.popen.stderr)
    assert process.popen.poll() is None
    process.signal(signal.SIGTERM)
    assert process.ended()[0] == 0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--bind", "ENDPOINT"], "choose another port"),
        (["--memory", "900000GiB"], "memory: 878.9 TiB requested, but only"),
        (["--bind", "tcp://0.0.0.0:*"], "--insecure"),
        (["--insecure", "--bind", "tcp://no.such.host.invalid:5000"], "is not this machine"),
        (["--insecure", "--bind", "203.0.113.9:5000"], "is not this machine"),
    ],
)
def test_an_operators_mistake_is_one_line_and_no_traceback(server, capsys, flags, complaint):
    flags = [server.endpoint if flag == "ENDPOINT" else flag for flag in flags]
    assert main(["serve", *FREE_PORT, "--memory", "16MiB", "--admin", "off", *flags]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert complaint in errors
    assert errors.count("\n") == 1


def test_an_unknown_flag_is_met_with_the_nearest_known_one(capsys):
    for flag, complaint in (
        ("--memry", "unknown flag --memry; did you mean --memory?"),
        ("--mem", "unknown flag --mem"),  # no guessing by prefix
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", flag, "1GiB"])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


def test_importing_all_of_it_loads_neither_torch_nor_vllm():
    found = pkgutil.walk_packages(remote_server.__path__, "remote_server.")
    # A library for ctypes has the suffix of a module, and is none.
    others = ("__main__", ".libkvferry")
    names = [module.name for module in found if not module.name.endswith(others)]
    assert "remote_server.server.server" in names
    program = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'kv_connector', 'benchmarks'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
