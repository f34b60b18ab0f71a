"""`kvferry`, the command, a file for each subcommand or for a few that are close. This one has the
flags, the connection and the output that they share; `__main__.py` has the list of them."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import ConfigError, DeadlineExceeded, KVFerryError, ServerUnavailable
from remote_server.plain_text import plain
from remote_server.protocol import PROTOCOL_VERSION, StatsReply, other_protocol
from remote_server.values import EXAMPLE, finite_number, server_address

_CODES = {"green": "32", "yellow": "33", "red": "31", "dim": "2", "bold": "1"}


def is_terminal() -> bool:
    return sys.stdout.isatty()


def coloured(text: str, colour: str) -> str:
    """`text`, coloured on a terminal whose user has not set NO_COLOR (no-color.org)."""
    if not is_terminal() or os.environ.get("NO_COLOR"):
        return text
    return f"\033[{_CODES[colour]}m{text}\033[0m"


def print_lines(*lines: str, mark: str = "", colour: str = "") -> None:
    """Print for people, at once. Every line is `plain`, because it may hold text from a server or
    its peers; `mark` comes first, in `colour`."""
    for line in lines:
        print((coloured(mark, colour) if mark else "") + plain(line), flush=True)


def print_error(line: str) -> None:
    """Print an error to stderr, made `plain` as well."""
    print(plain(f"kvferry: {line}"), file=sys.stderr)


def clear_screen() -> None:
    """Before the next output of a watched command."""
    if is_terminal():
        sys.stdout.write("\033[H\033[J")


def duration(seconds: float) -> str:
    """3 min 20 s: for people."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def agreed(question: str) -> bool:
    """False without a terminal: a script passes --yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


MOST_SECONDS = 86_400


class NoServer(KVFerryError):
    """No server answered at the address."""


def add_server(parser: argparse.ArgumentParser) -> None:
    """`--server` and `--timeout-s`, for commands that connect to one server."""
    parser.add_argument(
        "--server",
        default=os.environ.get("KVFERRY_SERVER", EXAMPLE),
        type=checked_address,
        metavar="ADDRESS",
        help="the cache server, tcp://host:port, of one with keys tcp://host:port?keys=FILE "
        "(KVFERRY_SERVER; default: %(default)s)",
    )
    add_timeout(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """`--timeout-s`."""
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=3.0,
        metavar="SECONDS",
        help="how long to wait for an answer (default: %(default)s)",
    )


def seconds(text: str) -> float:
    """`text` as a time to wait, above zero and up to a day; for `argparse`."""
    if number := seconds_or_none(text):
        return number
    raise argparse.ArgumentTypeError(f"{text!r} is not above zero")


def seconds_or_none(text: str) -> float:
    """`text` as a time of up to a day, which may be zero; for `argparse`."""
    try:
        if 0 <= (number := finite_number(text)) <= MOST_SECONDS:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r:.80} is not a time of up to {MOST_SECONDS} seconds")


def checked_address(text: str) -> str:
    """`text`, when a client can connect there; for `argparse`."""
    try:
        server_address(text, "")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def client_of(server: str, **options: Any) -> RemoteClient:
    """A client of `server`, an address as in `--server`, with `options` of `ClientConfig`. Raises
    `ConfigError`."""
    address = server_address(server, "--server")
    return RemoteClient(ClientConfig(address.endpoint, keys=address.keys, quiet=True, **options))


@contextmanager
def connected(flags: argparse.Namespace) -> Iterator[RemoteClient]:
    """A client of the server in the flags. The block raises `NoServer` when no answer arrives in
    time."""
    client = client_of(flags.server, client_name="kvferry", transport="tcp")
    try:
        _wait_until_ready(client, flags.timeout_s)
        yield client
    except (ServerUnavailable, DeadlineExceeded) as error:
        raise NoServer(
            f"no answer from {flags.server} within {flags.timeout_s:g} s; is it running? "
            "--server names another"
        ) from error
    finally:
        client.close()


def ask_stats(client: RemoteClient, timeout_s: float, *, fingerprints: bool = False) -> StatsReply:
    """`fingerprints`: with those of namespaces. Raises `DeadlineExceeded` or `ServerUnavailable`,
    this also for a server of another protocol."""
    asked = client.stats(fingerprints=fingerprints, timeout_s=timeout_s)
    reply = asked.result(timeout_s + 1)
    if reply.protocol != PROTOCOL_VERSION:
        raise ServerUnavailable(other_protocol(reply.protocol, PROTOCOL_VERSION))
    return reply


def _wait_until_ready(client: RemoteClient, timeout_s: float) -> None:
    """Requests fail until the client, which connects by itself, is ready."""
    ends_by = time.monotonic() + timeout_s
    while not client.ready:
        if client.absent or time.monotonic() > ends_by:
            raise ServerUnavailable("not connected")
        time.sleep(0.01)
