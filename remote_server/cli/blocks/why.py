"""`kvferry why`: the settings that keep engines from sharing blocks, or the origin of one block."""

import argparse

from remote_server.cli.blocks import fleet_why
from remote_server.cli.blocks.blocks_lines import key_in, origin, place_of, report, settled, where
from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.figures.what_if_lines import why_lines
from remote_server.cli.flags import add_json
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, servers_of
from remote_server.client import RemoteClient
from remote_server.protocol import UNKNOWN, Found
from remote_server.protocol.codec import ascii_json
from remote_server.protocol.namespace_diff import all_gaps


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument(
        "about", nargs="?", metavar="NAMESPACE|KEY",
        help="only this namespace, or those with this prefix; or a block's key in hexadecimal",
    )  # fmt: skip
    add_json(parser)


def run(flags: argparse.Namespace) -> int:
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_why.why(servers, flags)
    with connected(flags) as client:
        reply = ask_stats(client, flags.timeout_s, fingerprints=True)
        chosen = flags.about or ""
        if (key := key_in(chosen, reply.namespaces)) is not None:
            return _explain(client, key, [*reply.namespaces], flags)
    gaps = [gap for gap in all_gaps(reply.namespaces) if gap.namespace.startswith(chosen)]
    known = [name for name in reply.namespaces if name.startswith(chosen)]
    if flags.json:
        print_lines(ascii_json([gap._asdict() for gap in gaps]))
    elif not known:
        named = f" that begins with {chosen!r}" if chosen else ""
        print_lines(
            f"no engine has declared a namespace{named}",
            "an engine declares one when its server answers; its log has the server's address",
        )
        return 1
    else:
        print_lines(*report(reply, known, gaps), *why_lines(reply, known))
    return 1 if gaps or not known else 0


def _explain(
    client: RemoteClient, key: bytes, namespaces: list[str], flags: argparse.Namespace
) -> int:
    replies = _look_up(client, key, namespaces, flags.timeout_s)
    found = {
        name: next(iter(reply.chain), UNKNOWN) for name, reply in replies.items() if reply.prefix
    }
    copies = {name: next(iter(replies[name].copies), []) for name in found}
    if flags.json:
        facts = [place_of(name, one) | {"copies": copies[name]} for name, one in found.items()]
        print_lines(ascii_json(facts))
    elif found:
        for name, block in found.items():
            print_lines(f"{name}: {origin(block)}", *(f"  {where(one)}" for one in copies[name]))
    else:
        print_lines("no namespace has a readable block of this key")
    return 0 if found else 1


def _look_up(
    client: RemoteClient, key: bytes, namespaces: list[str], timeout_s: float
) -> dict[str, Found]:
    """The replies by namespace."""

    def ask() -> dict[str, Found]:
        asked = {
            name: client.lookup(name, (key,), explain=True, timeout_s=timeout_s)
            for name in namespaces
        }
        return {name: reply.result(timeout_s + 1) for name, reply in asked.items()}

    return settled(ask, timeout_s)


COMMAND = Command(
    add_flags,
    run,
    description="Compare what the engines of a server declared, and name the settings that keep "
    "them from each other's blocks. Exit status 1 when there are any. With a key: the tokens and "
    "the group of its block, the request that put it, and its copies. Exit status 1 when no "
    "namespace has it.",
    examples="""\
kvferry why                      # do all engines that could share blocks share them?
kvferry why llama                # of the namespaces that begin so
kvferry why 6f1c…                # one block, by its key in hexadecimal
""",
)
