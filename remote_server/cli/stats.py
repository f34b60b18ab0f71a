"""`kvferry stats` and `kvferry watch`: contents and counts of a server or of a list, and their
changes."""

import argparse
import time
from collections.abc import Iterator
from typing import Any

from remote_server.cli import (
    NoServer,
    ask_stats,
    clear_screen,
    connected,
    fleet_stats,
    print_lines,
    seconds,
)
from remote_server.cli.servers import add_servers, servers_of
from remote_server.cli.stats_lines import events, picture, print_events
from remote_server.client import RemoteClient
from remote_server.protocol import StatsReply
from remote_server.protocol.codec import ascii_json


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "stats", help="the server's contents, and its counts since its start"
    )
    add_servers(parser)
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one object a line, for scripts")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_stats.run(servers, flags)
    with connected(flags) as client:
        before: StatsReply | None = None
        for reply in _replies(client, flags):
            if flags.json:
                print_lines(ascii_json(reply))
            else:
                if flags.watch:
                    clear_screen()
                print_lines(*picture(reply, before))
            before = reply
    return 0


def _replies(client: RemoteClient, flags: argparse.Namespace) -> Iterator[StatsReply]:
    yield ask_stats(client, flags.timeout_s, fingerprints=flags.json)
    while flags.watch:
        time.sleep(1)
        yield ask_stats(client, flags.timeout_s, fingerprints=flags.json)


# ── watch ────────────────────────────────────────────────────────────────────────────────


def add_watch(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch", help="changes on the server, line by line, until Ctrl-C"
    )
    add_servers(parser)
    parser.add_argument("--every-s", type=seconds, default=1.0, metavar="SECONDS",
                        help="how long one line covers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object a line, for scripts")
    parser.set_defaults(run=run_watch)


def run_watch(flags: argparse.Namespace) -> int:
    """Goes on over restarts of the server, which are events too."""
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_stats.run_watch(servers, flags)
    before: StatsReply | None = None
    with connected(flags) as client:
        while True:
            try:
                now = ask_stats(client, flags.timeout_s)
            except Exception as error:
                if before is not None:
                    print_events(flags, ["the server is gone"], {})
                    before = None
                if client.closed:
                    raise NoServer("the connection is closed") from error
            else:
                lines, grown = events(before, now)
                if lines:
                    print_events(flags, lines, grown)
                before = now
            time.sleep(flags.every_s)
