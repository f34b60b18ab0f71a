"""`kvferry clear`: remove blocks from a server. `kvferry pin`: keep blocks in its memory. `kvferry
unpin`: let them be evicted again."""

import argparse
import sys
from functools import partial
from typing import Any

from remote_server.cli.common import add_server, ask_stats, connected, print_error, print_lines
from remote_server.protocol import Cleared, Kept, read_key
from remote_server.protocol.codec import ascii_json
from remote_server.sizes import format_bytes


def add_clear(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "clear", help="remove the blocks of one namespace, or all"
    )
    add_server(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--namespace", metavar="NAME", help="the blocks of this one")
    what.add_argument("--all", action="store_true", help="the blocks of every namespace")
    parser.add_argument("--forget", action="store_true", help="forget the namespace as well")
    parser.add_argument("--yes", action="store_true", help="skip the question")
    parser.set_defaults(run=clear)


def clear(flags: argparse.Namespace) -> int:
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
    print_lines(summary_of(removed))
    return 0


def summary_of(cleared: Cleared) -> str:
    counts = ", ".join(f"{count:,} from {tier}" for tier, count in cleared.removed.items())
    return f"removed blocks: {counts}"


def _agreed(question: str) -> bool:
    """False without a terminal: a script passes --yes."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


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
    add_server(parser)
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
        _print_result(flags.namespace, done, absent, keep=keep)
    return 0 if done.kept and not done.declined else 1


def _print_result(namespace: str, done: Kept, absent: int, *, keep: bool) -> None:
    did, missing = ("pinned", "in memory") if keep else ("unpinned", "pinned")
    if done.kept:
        print_lines(f"{did} {done.kept:,} blocks, {format_bytes(done.bytes)}")
    elif not done.declined:
        which = f"no block of {namespace!r}" if not absent else f"none of the {absent:,} keys"
        print_error(f"{which} is {missing}")
        return
    if absent:
        print_error(f"{absent:,} keys are not {missing}")
    if done.declined:
        print_error(
            f"{done.declined:,} blocks declined: no more than half of the memory's slabs, or of a "
            "quota, may hold pinned blocks"
        )
