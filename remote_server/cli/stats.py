"""`kvferry stats`: contents and counts of a server, or of a list of servers."""

import argparse
import time
from collections.abc import Iterator

from remote_server.cli import fleet_stats
from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.flags import add_json
from remote_server.cli.output import clear_screen, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.cli.stats_lines import picture
from remote_server.client import RemoteClient
from remote_server.protocol import StatsReply
from remote_server.protocol.codec import ascii_json


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
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
                print_lines(*picture(reply, before))
            before = reply
    return 0


def _replies(client: RemoteClient, flags: argparse.Namespace) -> Iterator[StatsReply]:
    yield ask_stats(client, flags.timeout_s, fingerprints=flags.json)
    while flags.watch:
        time.sleep(1)
        yield ask_stats(client, flags.timeout_s, fingerprints=flags.json)


COMMAND = Command(
    add_flags,
    run,
    examples="""\
kvferry stats
kvferry stats --watch --server 10.0.0.7:5757
kvferry stats --server 'tcp://kvferry-{0..2}.kvferry:5757'      # a fleet, summed
kvferry stats --json | jq .counters
""",
)
