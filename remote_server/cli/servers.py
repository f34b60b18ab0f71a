"""`--server` of commands that take a list of servers, and the requests that go to all of them."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from remote_server.cli.exit_status import NoServer
from remote_server.cli.flags import add_timeout
from remote_server.cli.output import print_error
from remote_server.client import ClientConfig
from remote_server.errors import ConfigError
from remote_server.fleet.each import EachServer, Replies, each_server
from remote_server.fleet.server_list import ServerList, read_list
from remote_server.protocol import StatsReply
from remote_server.values import EXAMPLE

T = TypeVar("T")

# A path of a key file may have a comma in it, so that one without an address behind it stays.
_COMMA = re.compile(r",\s*(?=tcp://|[^,/?&=\s]+:[0-9]{1,5}(?:[?,]|$))")

_MOST_NAMED = 3


def add_servers(parser: argparse.ArgumentParser) -> None:
    """`--server`, an address or a list, and `--timeout-s`. `flags.server` is one text; `servers_of`
    reads it."""
    parser.add_argument(
        "--server",
        action=_AddServer,
        default=os.environ.get("KVFERRY_SERVER", EXAMPLE),
        type=_checked_list,
        metavar="ADDRESS",
        help="the cache server, host:port, of one with keys host:port?keys=FILE, or a list of "
        "servers: a range host-{0..9}:port, addresses with commas between them, "
        "file:///path, or --server once for each (KVFERRY_SERVER; default: %(default)s)",
    )
    add_timeout(parser)


class _AddServer(argparse.Action):
    """Adds an address to those given before; the first one replaces the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [*getattr(namespace, "given_servers", ()), str(values)]
        namespace.given_servers = given
        namespace.server = ",".join(given)


def _checked_list(text: str) -> str:
    try:
        _read(text, "")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _read(text: str, what: str) -> ServerList:
    addresses = _COMMA.split(text)
    return read_list(text if len(addresses) == 1 else addresses, what)


def servers_of(flags: argparse.Namespace) -> ServerList:
    """The servers in the flags, of `add_servers`. Raises `ConfigError`. Of one server
    `flags.server` is its address from now on."""
    servers = _read(flags.server, "--server")
    if len(servers.members) == 1:
        flags.server = _address_of(flags.server, servers)
    return servers


def _address_of(text: str, servers: ServerList) -> str:
    """The address of the one server, as given where it is an address."""
    (one,) = servers.members
    if text.partition("?")[0] == one.endpoint:
        return text
    return f"{one.endpoint}?keys={one.keys}" if one.keys else one.endpoint


def one_server(text: str) -> str:
    """`text` as the address of one server; for `argparse`, and commands that take no list."""
    servers = _read(_checked_list(text), "")
    if (number := len(servers.members)) > 1:
        first = servers.members[0].endpoint
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is a list of {number:,} servers, and this command takes one: name it, "
            f"for example {first}"
        )
    return _address_of(text, servers)


@contextmanager
def connected_to_each(
    servers: ServerList, flags: argparse.Namespace, *, fingerprints: bool = False
) -> Iterator[tuple[EachServer, Replies[StatsReply]]]:
    """The servers, and the statistics of those that answer. Raises `NoServer` when none does."""
    config = ClientConfig(
        servers.members[0].endpoint, client_name="kvferry", quiet=True, transport="tcp"
    )
    with each_server(servers, config, flags.timeout_s) as each:
        replies = each.stats(flags.timeout_s, fingerprints=fingerprints)
        if not replies.received:
            print_failed(replies.failed)
            raise NoServer(
                f"none of the {len(servers.members):,} servers answered within "
                f"{flags.timeout_s:g} s; --server names others"
            )
        yield each, replies


def print_failed(failed: Mapping[str, str]) -> None:
    """A line to stderr for each server that did not answer."""
    for name, why in failed.items():
        print_error(f"{name}: {why}")


def some(names: Iterable[str], most: int = _MOST_NAMED) -> str:
    """`names` for people, the first few of many."""
    shown = [*names]
    more = f" and {len(shown) - most:,} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
