"""The long run's oracle detects each kind of failure."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event

import chaos_client
import pytest
import soak
from actors import Habits
from chaos_client import Hung, WrongBytes
from chaos_server import PATIENCE_S, eventually
from crew import Crew, CrewPlan
from oracle import PAGES, SMALL_NAMESPACES, content, key
from random_run import Plan, Report, Run
from sky import Sky

from remote_server.client import ClientConfig, RemoteClient

HABITS = Habits(SMALL_NAMESPACES)
NUM_OPERATIONS = 50
REPOSITORY = Path(soak.__file__).parents[3]


@contextlib.contextmanager
def calm_run(seed):
    """Without faults: those are in `test_random_run.py`."""
    plan = Plan(
        seed, operations=NUM_OPERATIONS, transports=("lanes", "shm"), habits=HABITS,
        memory="16MiB", disk_bytes="32MiB", calm=True,
    )  # fmt: skip
    with Run(plan) as run:
        run.round()
        run.check()
        yield run


@pytest.fixture(scope="module")
def run(seed):
    with calm_run(seed) as run:
        yield run


@pytest.fixture
def own_run(seed):
    """What other tests have left open was open before it."""
    with calm_run(seed) as run:
        yield run


@contextlib.contextmanager
def observing(run):
    """A client that no proxy disturbs. Its files do not count once the block has ended."""
    client = RemoteClient(ClientConfig(run.server.endpoint, client_name="observer"))
    with contextlib.closing(client):
        client.declare(PAGES.name, PAGES.block_bytes)
        eventually(lambda: client.ready, "the observer is ready")
        yield client


@pytest.fixture
def crew(run, seed):
    """One client without faults, beside those of the run."""
    plan = CrewPlan(1, seed, ("shm",), HABITS, calm=True)
    with contextlib.closing(Crew(plan, run.server.endpoint, Sky())) as crew:
        crew.warm_up()
        yield crew
        with contextlib.suppress(AssertionError):  # that of the test
            crew.stop()


def work_until_it_fails(crew: Crew) -> None:
    crew.begin(0)
    eventually(lambda: crew.progress() is None, "it goes on as if nothing was wrong")


def test_the_record_of_a_run_counts_its_operations(run):
    report = run.report
    record = soak.record(report, None)
    assert record["operations"] == report.totals.outcomes.total() >= NUM_OPERATIONS
    assert sum(record["operations_by_kind"].values()) == record["operations"]
    assert (record["wrong_blocks"], record["hangs"], record["left_over"]) == (0, 0, 0)


def test_what_stays_is_detected(own_run):
    keys = [key(PAGES, 0)]
    row = memoryview(bytearray(content(PAGES, 0)))
    with observing(own_run) as observer:
        assert observer.put(PAGES.name, keys, [row], deferred=False).result(PATIENCE_S).total == 1
        assert observer.keep(PAGES.name, keys).result(PATIENCE_S).kept == 1
    for one in own_run.crews:
        one.settle()
    with pytest.raises(AssertionError, match="pins and leases"):
        own_run.check(patience_s=0)
    with observing(own_run) as observer:
        observer.keep(PAGES.name, keys, keep=False).result(PATIENCE_S)
    own_run.check()
    with open(os.devnull), pytest.raises(AssertionError, match="crew 0 has"):
        own_run.check(patience_s=0)
    own_run.check()


def test_a_wrong_byte_is_detected(run, crew):
    """Its checksum is right: it was stored so."""
    numbers = range(PAGES.num_keys // 10)
    rows = [bytearray(content(PAGES, number)) for number in numbers]
    for row in rows:
        row[-1] ^= 1
    keys = [key(PAGES, number) for number in numbers]
    views = [*map(memoryview, rows)]
    with observing(run) as observer:
        put = observer.put(PAGES.name, keys, views, force=True, deferred=False)
        assert put.result(PATIENCE_S).total == len(keys)
        with pytest.raises(WrongBytes, match="pages/"):
            work_until_it_fails(crew)
        observer.clear(PAGES.name).result(PATIENCE_S)


def test_an_operation_that_does_not_end_is_detected(crew, monkeypatch):
    """The client's thread is held where its callers' callbacks run."""
    monkeypatch.setattr(chaos_client, "SLACK_S", 0.2)
    gate, held = Event(), Event()
    (client,) = crew.clients
    client.stats().add_done_callback(lambda _: (held.set(), gate.wait(PATIENCE_S)))
    assert held.wait(PATIENCE_S)
    try:
        with pytest.raises(Hung, match="behind its deadline"):
            work_until_it_fails(crew)
    finally:
        gate.set()


@pytest.mark.parametrize(
    ("error", "counts"),
    [(WrongBytes("a"), (1, 0, 0)), (Hung("a"), (0, 1, 0)), (AssertionError("a"), (0, 0, 1))],
)
def test_the_record_of_a_failure_has_its_kind(error, counts):
    record = soak.record(Report(7), error)
    assert (record["wrong_blocks"], record["hangs"], record["left_over"]) == counts
    assert record["error"] == "a"


@pytest.mark.parametrize("target", ["soak", "chaos-long", "fleet-soak"])
def test_the_makefile_starts_it(target):
    """Its imports were found here, where pytest gives the path, and not there."""
    command = ["make", "--silent", "--old-file=.venv/.ready", target, "ARGS=--help"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    # Without a C compiler `make` prints that first.
    usage = re.sub(r"\Akvferry: .* not built .*\n", "", ran.stdout)
    assert usage.startswith("usage: "), ran.stderr


@pytest.mark.whole
def test_ctrl_c_prints_the_result_so_far_and_ends_every_process():
    command = [sys.executable, str(Path(soak.__file__)), "--operations", "1000000000"]
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with process:
        for _ in range(2):
            process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 130, output
    assert "operations" in output and "0 wrong blocks" in output
