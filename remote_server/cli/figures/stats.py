"""`kvferry stats`: contents and counts of a server, or of a list of servers."""

import argparse
import time
from collections.abc import Iterator

from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.figures import fleet_stats
from remote_server.cli.figures.stats_lines import picture
from remote_server.cli.figures.what_if_lines import what_if_lines
from remote_server.cli.flags import add_json
from remote_server.cli.output import clear_screen, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.client import RemoteClient
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
                lines = what_if_lines(reply) if flags.what_if else picture(reply, before)
                print_lines(*lines)
            before = reply
    return 0


def _replies(client: RemoteClient, flags: argparse.Namespace) -> Iterator[StatsReply]:
    in_full = flags.json or flags.what_if
    yield ask_stats(client, flags.timeout_s, fingerprints=in_full)
    while flags.watch:
        time.sleep(1)
        yield ask_stats(client, flags.timeout_s, fingerprints=in_full)


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
