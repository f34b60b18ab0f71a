"""`kvferry stats`: contents and counts of a server, or of a list of servers."""

import argparse
import time
from collections.abc import Iterator, Mapping

from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.figures import fleet_stats
from remote_server.cli.figures.stats_lines import Look, contents, head
from remote_server.cli.figures.what_if_lines import what_if_lines
from remote_server.cli.flags import add_json
from remote_server.cli.output import clear_screen, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, connected_to_each, print_failed, servers_of
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import StatsReply
from remote_server.protocol.codec import ascii_json


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    parser.add_argument(
        "--what-if", action="store_true",
        help="what more or less memory, disk or bucket would find of the same requests",
    )  # fmt: skip
    add_json(parser, lines=True)


def run(flags: argparse.Namespace) -> int:
    """Exit status 1 when a server of a list did not answer, the last time that it was asked."""
    servers = servers_of(flags)
    before: StatsReply | None = None
    failed: Mapping[str, str] = {}
    for look in _looks(servers, flags):
        failed = look.failed
        if flags.json:
            print_lines(ascii_json(look.json))
        else:
            if flags.watch:
                clear_screen()
            lines = what_if_lines(look.total) if flags.what_if else contents(look.total, before)
            print_lines(*look.head, *lines)
            print_failed(failed)
        before = look.total
    return 1 if failed else 0


def _looks(servers: ServerList, flags: argparse.Namespace) -> Iterator[Look]:
    """One, or with `--watch` one every second."""
    in_full = flags.json or flags.what_if
    if len(servers.members) > 1:
        with connected_to_each(servers, flags, fingerprints=in_full) as (each, replies):
            yield fleet_stats.look_at(servers, replies)
            while flags.watch:
                time.sleep(1)
                replies = each.stats(flags.timeout_s, fingerprints=in_full)
                yield fleet_stats.look_at(servers, replies)
        return
    with connected(flags) as client:
        while True:
            reply = ask_stats(client, flags.timeout_s, fingerprints=in_full)
            yield Look(reply, reply, [] if flags.what_if else [head(reply), ""], {})
            if not flags.watch:
                return
            time.sleep(1)


COMMAND = Command(
    add_flags,
    run,
    examples="""\
kvferry stats
kvferry stats --watch --server 10.0.0.7:5757
kvferry stats --server 'tcp://kvferry-{0..2}.kvferry:5757'      # a fleet, summed
kvferry stats --what-if          # what would more memory bring?
kvferry stats --json | jq .counters
""",
)
