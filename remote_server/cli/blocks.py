"""Commands about blocks and their namespaces.

`kvferry why`: the settings that keep engines from sharing blocks, or the origin of one block.
`kvferry clear`: remove blocks from a server. `kvferry pin`: keep blocks in its memory. `kvferry
unpin`: let them be evicted again.
"""

import argparse
import time
from functools import partial
from typing import Any

from remote_server.cli import (
    agreed,
    ask_stats,
    connected,
    fleet_blocks,
    fleet_why,
    print_error,
    print_lines,
)
from remote_server.cli.blocks_lines import (
    PENDING_S,
    key_in,
    origin,
    print_result,
    report,
    summary_of,
    where,
)
from remote_server.cli.servers import add_servers, servers_of
from remote_server.client import RemoteClient
from remote_server.protocol import UNKNOWN, Found, KeyState, read_key
from remote_server.protocol.codec import ascii_json
from remote_server.protocol.namespace_diff import all_gaps


def add_why(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "why",
        help="why does an engine get no hits? which setting differs?",
        description="Compare what the engines of a server declared, and name the settings that "
        "keep them from each other's blocks. Exit status 1 when there are any. With a key: the "
        "tokens and the group of its block, the request that put it, and its copies. Exit status 1 "
        "when no namespace has it.",
    )
    add_servers(parser)
    parser.add_argument(
        "about", nargs="?", metavar="NAMESPACE|KEY",
        help="only this namespace, or those with this prefix; or a block's key in hexadecimal",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    parser.set_defaults(run=why)


def why(flags: argparse.Namespace) -> int:
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
        print_lines(*report(reply, known, gaps))
    return 1 if gaps else 0


def _explain(
    client: RemoteClient, key: bytes, namespaces: list[str], flags: argparse.Namespace
) -> int:
    replies = _look_up(client, key, namespaces, flags.timeout_s)
    found = {
        name: next(iter(reply.chain), UNKNOWN) for name, reply in replies.items() if reply.prefix
    }
    copies = {name: next(iter(replies[name].copies), []) for name in found}
    if flags.json:
        facts = [
            {"namespace": name, "start": block.start, "end": block.end, "group": block.group,
             "known": block.known, "copies": copies[name]}
            for name, block in found.items()
        ]  # fmt: skip
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
    """The replies by namespace. While a copy is still being looked for, they are asked again."""
    deadline = time.monotonic() + timeout_s
    while True:
        asked = {
            name: client.lookup(name, (key,), explain=True, timeout_s=timeout_s)
            for name in namespaces
        }
        replies = {name: reply.result(timeout_s + 1) for name, reply in asked.items()}
        pending = any(KeyState.PENDING in reply.states for reply in replies.values())
        if not pending or time.monotonic() >= deadline:
            return replies
        time.sleep(PENDING_S)


def add_clear(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "clear", help="remove the blocks of one namespace, or all"
    )
    add_servers(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="NAME", help="the blocks of this one")
    what.add_argument("--all", action="store_true", help="the blocks of every namespace")
    parser.add_argument("--forget", action="store_true", help="forget the namespace as well")
    parser.add_argument("--yes", action="store_true", help="skip the question")
    parser.set_defaults(run=clear)


def clear(flags: argparse.Namespace) -> int:
    servers = servers_of(flags)
    if len(servers.members) > 1:
        return fleet_blocks.clear(servers, flags)
    with connected(flags) as client:
        namespaces = ask_stats(client, flags.timeout_s).namespaces
        if flags.namespace is not None and flags.namespace not in namespaces:
            known = ", ".join(sorted(namespaces)) or "none"
            print_error(f"no namespace {flags.namespace!r}; known: {known}")
            return 1
        about = [flags.namespace] if flags.namespace is not None else list(namespaces)
        num_blocks = sum(namespaces[name].total.blocks for name in about)
        if not flags.yes and not agreed(f"remove {num_blocks:,} blocks of {flags.server}?"):
            print_error("nothing removed; --yes skips the question")
            return 1
        removed = client.clear(
            flags.namespace, forget=flags.forget, timeout_s=flags.timeout_s
        ).result(flags.timeout_s + 1)
    print_lines(summary_of(removed))
    return 0


def add_pin(commands: Any) -> None:
    _add_one(
        commands,
        "pin",
        "keep blocks in memory",
        "Keep blocks from eviction, until unpin, clear, their age, or a restart of the server. "
        "At most half of the memory. Exit status 1 when that was too little, or none was found.",
        keep=True,
    )
    _add_one(
        commands,
        "unpin",
        "let pinned blocks be evicted again",
        "Undo pin. Exit status 1 when nothing was pinned.",
        keep=False,
    )


def _add_one(commands: Any, name: str, text: str, description: str, *, keep: bool) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    add_servers(parser)
    parser.add_argument("namespace", metavar="NAMESPACE")
    parser.add_argument(
        "keys",
        nargs="*",
        type=_key,
        metavar="KEY_HEX",
        help="these blocks; without any, all of the namespace",
    )
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    parser.set_defaults(run=partial(pin, keep=keep))


def _key(text: str) -> bytes:
    try:
        return read_key(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def pin(flags: argparse.Namespace, *, keep: bool) -> int:
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
        print_lines(ascii_json({"kept" if keep else "let_go": done.kept, "bytes": done.bytes,
                        "declined": done.declined, "absent": absent}))  # fmt: skip
    else:
        print_result(flags.namespace, done, absent, keep=keep)
    return 0 if done.kept and not done.declined else 1
