"""`kvferry clear`: remove blocks from a server, or from every server of a list."""

import argparse
from collections import Counter

from remote_server.cli.blocks import fleet_blocks
from remote_server.cli.blocks.blocks_lines import may_clear, summary_of, to_clear
from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="NAME", help="the blocks of this one")
    what.add_argument("--all", action="store_true", help="the blocks of every namespace")
    parser.add_argument("--forget", action="store_true", help="forget the namespace as well")
    parser.add_argument("--yes", action="store_true", help="skip the question")


def run(flags: argparse.Namespace) -> int:
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_blocks.clear(servers, flags)
    with connected(flags) as client:
        namespaces = ask_stats(client, flags.timeout_s).namespaces
        if not may_clear(flags, namespaces, flags.server):
            return 1
        removed: Counter[str] = Counter()
        for name in to_clear(flags, namespaces):
            asked = client.clear(name, forget=flags.forget, timeout_s=flags.timeout_s)
            removed.update(asked.result(flags.timeout_s + 1).removed)
    print_lines(summary_of(removed))
    return 0


COMMAND = Command(
    add_flags,
    run,
    examples="""\
kvferry clear --namespace NAME --yes     # `kvferry stats` lists the names
kvferry clear --all --forget
""",
)
