"""The flags of six_systems, and the hosts that they name."""

import argparse
import socket

from benchmarks.harness import options
from benchmarks.six_systems import catalogue
from benchmarks.six_systems.catalogue import SYSTEMS, Entry
from benchmarks.six_systems.hosts import launch
from benchmarks.six_systems.hosts.nodes import Plan
from remote_server.values import MiB


def parser(module: str) -> argparse.ArgumentParser:
    made = options.parser(module, "what would keep these blocks best")
    add = made.add_argument
    add("--block-bytes", type=options.size, default=MiB, metavar="SIZE",
        help="size of a block (default: 1MiB)")  # fmt: skip
    add("--total", type=options.size, default=256 * MiB, metavar="SIZE",
        help="bytes that each system keeps (default: 256MiB)")  # fmt: skip
    add("--processes", type=options.positive, default=1, metavar="N",
        help="client processes, each with its part of --total (default: 1)")  # fmt: skip
    add("--systems", nargs="+", type=_systems, default=[SYSTEMS], metavar="NAME",
        help="parts of names, as in: redis memcached \"kvferry, tcp\" (default: all)")  # fmt: skip
    add("--shared-prefix", action=argparse.BooleanOptionalAction, default=True,
        help="count blocks of sessions with a common prefix (default: yes)")  # fmt: skip
    add("--prefix-block-bytes", type=options.size, default=64 << 10, metavar="SIZE",
        help="size of a block of these sessions (default: 64KiB)")  # fmt: skip
    add("--latency", type=_count, default=100, metavar="N",
        help="writes and reads of one block at a time, for their percentiles; 0: none "
        "(default: 100)")  # fmt: skip
    add("--hosts", type=_hosts, default=[], metavar="NAMES",
        help="start --processes clients, and each system's server, on each of these hosts, as in "
        "a,b,c; all take each step at once, and --total is of all of them")  # fmt: skip
    add("--launch", default="ssh", metavar="HOW",
        help="how: ssh, srun, local (processes on this host, under those names), or a command with "
        "{host} and {command} (default: ssh); the repository has the same path there")  # fmt: skip
    add("--address", metavar="NAME",
        help="name or address of this host for the others (default: its host name)")  # fmt: skip
    add("--port", type=int, default=0, metavar="PORT",
        help="port for them to connect to (default: a free one)")  # fmt: skip
    add("--print-launch", action="store_true", help="print the commands of --hosts and end")
    options.add_resume(made)
    add("--directory", type=options.folder, default=".", metavar="DIR",
        help="folder on the disk to measure; files are removed (default: this one)")  # fmt: skip
    return made


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _hosts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different names, as in a,b,c")
    if wrong := [name for name in names if name.startswith("-")]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} would be read as an option")
    return names


def _systems(text: str) -> list[Entry]:
    if found := catalogue.choose(text):
        return found
    names = "; ".join(entry.name for entry in SYSTEMS)
    raise argparse.ArgumentTypeError(f"{text!r} is in none of: {names}")


def plan_of(arguments: argparse.Namespace) -> Plan | None:
    """The hosts of `--hosts`; None without them. Raises `ConfigError`."""
    if not arguments.hosts:
        return None
    how = launch.template(arguments.launch)
    address = arguments.address
    if address is None:
        address = "127.0.0.1" if arguments.launch == "local" else socket.gethostname()
    return Plan(tuple(arguments.hosts), how, address, arguments.port, arguments.directory.resolve())
