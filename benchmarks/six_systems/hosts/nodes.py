"""The hosts of a run over several: they are started, and take each step of a system at once."""

import contextlib
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import IO, Any, NamedTuple

from benchmarks.harness.runner import Skipped, WrongBytes
from benchmarks.six_systems.clients import Step
from benchmarks.six_systems.hosts import launch
from remote_server.values import is_loopback

READY_S = 60.0
_STEP_S = 900.0
_END_S = 20.0
_TIMED = ("write", "read")
_FAILURES: dict[str, type[Exception]] = {"Skipped": Skipped, "WrongBytes": WrongBytes}


class Plan(NamedTuple):
    """How the hosts of a run are reached."""

    hosts: tuple[str, ...]
    how: str
    """A template, as those of `launch.LAUNCHERS`."""

    address: str
    """The name of this host for the others."""

    port: int
    directory: Path

    def without_names(self, command: str) -> str:
        """A command line for the record, which has no name of a host."""
        names = ",".join(f"host{number}" for number in range(1, len(self.hosts) + 1))
        for option, value, shown in (
            ("--hosts", ",".join(self.hosts), names),
            ("--address", self.address, "this-host"),
        ):
            command = command.replace(f"{option} {value}", f"{option} {shown}")
            command = command.replace(f"{option}={value}", f"{option}={shown}")
        return command

    def words(self, port: int) -> list[list[str]]:
        """The command of each host."""
        return [
            launch.launch_words(
                self.how, host,
                launch.node_command(f"{self.address}:{port}", number, self.directory),
            )
            for number, host in enumerate(self.hosts)
        ]  # fmt: skip


class _Host(NamedTuple):
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]

    def last_words(self) -> str:
        self.log.seek(0)
        lines = [line for line in self.log.read().decode(errors="replace").splitlines() if line]
        return lines[-1].strip() if lines else "without a word"


class Nodes:
    """All hosts. Each call goes to all of them at once and returns when the last has answered."""

    def __init__(self, names: Sequence[str], pipes: Sequence["Connection[Any, Any]"]) -> None:
        self.names = names
        self._pipes = pipes
        self.step_s: list[float] = []
        """Seconds of the last timed step on each host."""

    def call(self, name: str, *arguments: object) -> list[Any]:
        """The answer of each host. Raises the error of the first that failed, with its number."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # its missing answer shows that it has ended
                pipe.send((name, *arguments))
        answers = [_answer(pipe, _STEP_S) for pipe in self._pipes]
        for number, (error, _) in enumerate(answers, 1):
            if error is not None:
                kind, text = error
                where = f"host {number}: "
                raise _FAILURES.get(kind, RuntimeError)(
                    where + (text if kind in _FAILURES else f"{kind}: {text}")
                )
        return [value for _, value in answers]

    def do(self, step: Step) -> None:
        seconds = self.call("do", step)
        if step in _TIMED:
            self.step_s = seconds


def _answer(pipe: "Connection[Any, Any]", patience_s: float) -> tuple[tuple[str, str] | None, Any]:
    try:
        if not pipe.poll(patience_s):
            pipe.close()  # a late answer would count for the next step
            return ("TimeoutError", f"no answer in {patience_s:g} s"), None
        error, value = pipe.recv()
    except (EOFError, OSError):
        return ("RuntimeError", "its process ended"), None
    return error, value


@contextmanager
def running(plan: Plan) -> Iterator[Nodes]:
    """The hosts, connected. Raises `Skipped` where one cannot be started, with its last words."""
    key = secrets.token_bytes(32)
    here = "127.0.0.1" if is_loopback(f"tcp://{plan.address}:1") else ""
    with ExitStack() as stack:
        listener = stack.enter_context(
            socket.create_server((here, plan.port), backlog=len(plan.hosts))
        )
        port: int = listener.getsockname()[1]
        hosts: list[_Host] = []
        pipes: dict[int, Connection[Any, Any]] = {}
        stack.callback(_end, hosts, pipes)
        for words in plan.words(port):
            launch.require(words)
            log = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            hosts.append(_Host(process, log))
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(key.hex().encode() + b"\n")
                process.stdin.flush()
        _accept(listener, key, hosts, pipes)
        yield Nodes(plan.hosts, [pipes[number] for number in range(len(hosts))])


def _accept(
    listener: socket.socket, key: bytes, hosts: Sequence[_Host],
    pipes: dict[int, "Connection[Any, Any]"],
) -> None:  # fmt: skip
    listener.settimeout(0.2)
    deadline = time.monotonic() + READY_S
    while len(pipes) < len(hosts):
        for number, host in enumerate(hosts):
            ended = host.process.poll()
            if number not in pipes and ended is not None:
                raise Skipped(f"host {number + 1}: ended with {ended}: {host.last_words()}")
        if time.monotonic() > deadline:
            late = ", ".join(f"{n + 1}" for n in range(len(hosts)) if n not in pipes)
            raise Skipped(f"host {late}: not connected after {READY_S:g} s")
        try:
            link, _ = listener.accept()
        except TimeoutError:
            continue
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe: Connection[Any, Any] = Connection(link.detach())
        try:
            deliver_challenge(pipe, key)
            answer_challenge(pipe, key)
            number = pipe.recv()
        except (AuthenticationError, EOFError, OSError):
            pipe.close()  # a stranger
            continue
        pipes[number] = pipe


def _end(hosts: Sequence[_Host], pipes: dict[int, "Connection[Any, Any]"]) -> None:
    for pipe in pipes.values():
        pipe.close()
    for host in hosts:
        assert host.process.stdin is not None
        with contextlib.suppress(OSError):
            host.process.stdin.close()
        try:
            host.process.wait(_END_S if pipes else 0)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait()
