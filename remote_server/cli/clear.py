"""`kvferry clear`: remove blocks from a server."""

import argparse
import sys
from typing import Any

from remote_server.cli.common import add_server, ask_stats, connected, print_error, print_lines
from remote_server.protocol import Cleared


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "clear", help="remove the blocks of one namespace, or all"
    )
    add_server(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="NAME", help="the blocks of this one")
    what.add_argument("--all", action="store_true", help="the blocks of every namespace")
    parser.add_argument("--forget", action="store_true", help="forget the namespace as well")
    parser.add_argument("--yes", action="store_true", help="skip the question")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    with connected(flags) as client:
        namespaces = ask_stats(client, flags.timeout_s).namespaces
        if flags.namespace is not None and flags.namespace not in namespaces:
            known = ", ".join(sorted(namespaces)) or "none"
            print_error(f"no namespace {flags.namespace!r}; known: {known}")
            return 1
        about = [flags.namespace] if flags.namespace is not None else list(namespaces)
        num_blocks = sum(namespaces[name].total.blocks for name in about)
        if not flags.yes and not _agreed(f"remove {num_blocks:,} blocks of {flags.server}?"):
            print_error("nothing removed; --yes skips the question")
            return 1
        removed = client.clear(
            flags.namespace, forget=flags.forget, timeout_s=flags.timeout_s
        ).result(flags.timeout_s + 1)
    print_lines(summary(removed))
    return 0


def summary(cleared: Cleared) -> str:
    counts = ", ".join(f"{count:,} from {tier}" for tier, count in cleared.removed.items())
    return f"removed blocks: {counts}"


def _agreed(question: str) -> bool:
    """False without a terminal: a script passes --yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
