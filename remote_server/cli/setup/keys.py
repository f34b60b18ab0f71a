"""`kvferry keys`: the key files of a server and its tenants."""

import argparse
from pathlib import Path

from remote_server.cli.exit_status import YES
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.keys import make_keys


def add_flags(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where the files are, or go")
    parser.add_argument(
        "tenants", nargs="*", default=[], metavar="TENANT",
        help="each gets a client key file; without one, only the server's missing files are made",
    )  # fmt: skip
    parser.add_argument("--suffix", default="", metavar="TEXT",
                        help="of the client's file: another pair for the same tenant")  # fmt: skip


def run(flags: argparse.Namespace) -> int:
    print_lines(*map(str, make_keys(flags.folder, flags.tenants, flags.suffix)))
    return YES


COMMAND = Command(
    add_flags,
    run,
    description="Make the key files of a server and its tenants. Overwrites nothing.",
    examples="""\
kvferry keys /etc/kvferry blue red           # a server, and two tenants
kvferry keys /etc/kvferry blue --suffix 2    # a second key of blue, to replace the first
""",
)
