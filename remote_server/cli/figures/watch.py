"""`kvferry watch`: changes on a server, or on a list of servers, line by line."""

import argparse
import time

from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.exit_status import NoServer
from remote_server.cli.figures import fleet_stats
from remote_server.cli.figures.stats_lines import events, print_events
from remote_server.cli.flags import add_json, seconds
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.protocol import StatsReply


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument("--every-s", type=seconds, default=1.0, metavar="SECONDS",
                        help="how long one line covers (default: %(default)s)")  # fmt: skip
    add_json(parser, lines=True)


def run(flags: argparse.Namespace) -> int:
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


COMMAND = Command(
    add_flags,
    run,
    description="Print what changes on the server, a line for each second with changes, until "
    "Ctrl-C.",
    examples="""\
kvferry watch
kvferry watch --every-s 10 --json
""",
)
