"""Commands that start the clients of each host of a run: by ssh, by srun, or by a template."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.commands.registry import REPOSITORY
from benchmarks.harness.runner import Skipped
from remote_server.errors import ConfigError

MODULE = "benchmarks.six_systems.hosts.node"

LAUNCHERS = {
    "ssh": "ssh -o BatchMode=yes {host} {command}",
    "srun": "srun --nodes=1 --ntasks=1 --nodelist={host} sh -c {command}",
    "local": "sh -c {command}",
}
"""`{host}` is a name of `--hosts`, `{command}` a line for a shell there, as one word. `local`
starts a process on this host whatever the name is."""


def template(text: str) -> str:
    """One of `LAUNCHERS`, or a template as theirs. Raises `ConfigError`."""
    chosen = LAUNCHERS.get(text, text)
    if "{command}" not in chosen:
        raise ConfigError(
            f"launch: {text!r} is none of {', '.join(LAUNCHERS)} and has no {{command}}"
        )
    return chosen


def node_command(address: str, number: int, directory: Path) -> str:
    """A line for a shell on a host, where the repository and the Python are under the same paths.
    The key of the run comes through its stdin and is in no command line."""
    words = [sys.executable, "-m", MODULE, "--connect", address, "--number", f"{number}",
             "--directory", f"{directory}"]  # fmt: skip
    return f"cd {shlex.quote(str(REPOSITORY))} && exec {shlex.join(words)}"


def launch_words(how: str, host: str, command: str) -> list[str]:
    """The words of the command that starts `command` on `host`."""
    return [word.replace("{host}", host).replace("{command}", command) for word in shlex.split(how)]


def require(words: Sequence[str]) -> None:
    """Raises `Skipped` without the program that starts processes on other hosts."""
    if shutil.which(words[0]) is None:
        raise Skipped(f"no {words[0]} on the PATH, which starts the client of a host")
