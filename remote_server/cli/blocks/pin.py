"""`kvferry pin`: keep blocks from eviction."""

import argparse
from functools import partial

from remote_server.cli.blocks import fleet_blocks
from remote_server.cli.blocks.blocks_lines import facts_of, print_result
from remote_server.cli.connection import connected
from remote_server.cli.flags import add_json
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.protocol import read_key
from remote_server.protocol.codec import ascii_json


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument("namespace", metavar="NAMESPACE", help="as `kvferry stats` lists it")
    parser.add_argument(
        "keys",
        nargs="*",
        type=_key,
        metavar="KEY_HEX",
        help="these blocks; without any, all of the namespace",
    )
    add_json(parser)


def _key(text: str) -> bytes:
    try:
        return read_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(flags: argparse.Namespace, *, keep: bool) -> int:
    """`keep`: pin them, else unpin them."""
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_blocks.pin(servers, flags, keep=keep)
    keys = [*dict.fromkeys(flags.keys)] or None
    with connected(flags) as client:
        done = client.keep(flags.namespace, keys, keep=keep, timeout_s=flags.timeout_s).result(
            flags.timeout_s + 1
        )
    absent = 0 if keys is None else len(keys) - done.kept - done.declined
    if flags.json:
        print_lines(ascii_json(facts_of(done, keep=keep) | {"absent": absent}))
    else:
        print_result(flags.namespace, done, absent, keep=keep)
    return 0 if done.kept and not done.declined else 1


COMMAND = Command(
    add_flags,
    partial(run, keep=True),
    description="Keep blocks from eviction, until unpin, clear, their age, or a restart of the "
    "server. At most half of the memory. Exit status 1 when that was too little, or none was "
    "found.",
    examples="""\
kvferry pin NAME           # all blocks of a namespace, as `kvferry stats` lists it
""",
)
