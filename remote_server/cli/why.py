"""`kvferry why`: the settings that keep engines from sharing blocks."""

import argparse
from typing import Any

from remote_server.ascii_json import ascii_json
from remote_server.cli.common import add_server, ask_stats, connected, print_lines
from remote_server.protocol import StatsReply
from remote_server.protocol.namespace_diff import Difference, all_gaps


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "why",
        help="why does an engine get no hits? which setting differs?",
        description="Compare what the engines of a server declared, and name the settings that "
        "keep them from each other's blocks. Exit status 1 when there are any.",
    )
    add_server(parser)
    parser.add_argument("namespace", nargs="?", help="only this one, or those with this prefix")
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    with connected(flags) as client:
        reply = ask_stats(client, flags.timeout_s, fingerprints=True)
    chosen = flags.namespace or ""
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
