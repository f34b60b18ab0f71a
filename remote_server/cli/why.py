"""`kvferry why`: the settings that keep engines from sharing blocks, or the origin of one block."""

import argparse
from collections.abc import Iterable
from typing import Any

from remote_server.cli.common import add_server, ask_stats, connected, print_lines
from remote_server.client import RemoteClient
from remote_server.protocol import UNKNOWN, StatsReply, Stretch, read_key
from remote_server.protocol.codec import ascii_json
from remote_server.protocol.namespace_diff import Difference, all_gaps


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "why",
        help="why does an engine get no hits? which setting differs?",
        description="Compare what the engines of a server declared, and name the settings that "
        "keep them from each other's blocks. Exit status 1 when there are any. With a key: the "
        "tokens and the group of its block, and the request that put it. Exit status 1 when no "
        "namespace has it.",
    )
    add_server(parser)
    parser.add_argument(
        "about", nargs="?", metavar="NAMESPACE|KEY",
        help="only this namespace, or those with this prefix; or a block's key in hexadecimal",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    with connected(flags) as client:
        reply = ask_stats(client, flags.timeout_s, fingerprints=True)
        chosen = flags.about or ""
        if (key := _key_in(chosen, reply.namespaces)) is not None:
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
        print_lines(*_report(reply, known, gaps))
    return 1 if gaps else 0


def _key_in(text: str, namespaces: Iterable[str]) -> bytes | None:
    """The key that `text` holds, unless a namespace begins with it."""
    if not text or any(name.startswith(text) for name in namespaces):
        return None
    try:
        return read_key(text)
    except ValueError:
        return None


def _explain(
    client: RemoteClient, key: bytes, namespaces: list[str], flags: argparse.Namespace
) -> int:
    timeout_s = flags.timeout_s
    asked = {
        name: client.lookup(name, (key,), explain=True, timeout_s=timeout_s) for name in namespaces
    }
    replies = {name: reply.result(timeout_s + 1) for name, reply in asked.items()}
    found = {
        name: next(iter(reply.chain), UNKNOWN) for name, reply in replies.items() if reply.prefix
    }
    if flags.json:
        facts = [
            {"namespace": name, "start": block.start, "end": block.end, "group": block.group,
             "known": block.known}
            for name, block in found.items()
        ]  # fmt: skip
        print_lines(ascii_json(facts))
    elif found:
        print_lines(*(f"{name}: {_origin(block)}" for name, block in found.items()))
    else:
        print_lines("no namespace has a readable block of this key")
    return 0 if found else 1


def _origin(block: Stretch) -> str:
    if not block.tokens:
        return "readable; its client sent no place in the prompt"
    request = {-1: "a request of unknown class", 0: "a first turn"}.get(
        block.known, f"a continued request, {block.known:,} tokens of which were known"
    )
    return f"tokens {block.start:,} to {block.end:,} of group {block.group}, put by {request}"


def _report(reply: StatsReply, known: list[str], gaps: list[Difference]) -> list[str]:
    width = max(len("namespace"), *map(len, known))
    titles = "".join(f"{name:>9}  " for name in reply.tiers)
    lines = [f"{'namespace':<{width}}  {titles}engine"]
    for name in known:
        stats = reply.namespaces[name]
        engine = stats.client or "not seen since the start"
        if stats.forgotten:
            engine = "no longer known: the fingerprints of others took its place"
        model = stats.fingerprint.get("model_name", "")
        runs = f"{engine}, of {model}" if model else engine
        blocks = "".join(f"{stats.share(tier).blocks:>9,}  " for tier in reply.tiers)
        lines.append(f"{name:<{width}}  {blocks}{runs}")
    lines.append("")
    if not gaps:
        return [*lines, "no two of them are nearly equal: each difference looks intended"]
    for gap in gaps:
        lines.append(gap.line())
    return [
        *lines,
        "",
        "make the settings equal and restart the engine: its blocks are then shared",
    ]
