"""Lines of `kvferry why`, `clear`, `pin` and `unpin`."""

import argparse
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from remote_server.cli.output import agreed, duration, print_error, print_lines
from remote_server.protocol import (
    BlockCopy,
    Found,
    Kept,
    KeyState,
    NamespaceStats,
    StatsReply,
    Stretch,
    read_key,
)
from remote_server.protocol.namespace_diff import Difference
from remote_server.values import format_bytes

_PENDING_S = 0.05
"""The time between two questions for a block that is being looked for."""


def settled(ask: Callable[[], dict[str, Found]], timeout_s: float) -> dict[str, Found]:
    """The replies of lookups. While a copy is still being looked for, they are asked again."""
    deadline = time.monotonic() + timeout_s
    while True:
        replies = ask()
        pending = any(KeyState.PENDING in reply.states for reply in replies.values())
        if not pending or time.monotonic() >= deadline:
            return replies
        time.sleep(_PENDING_S)


def place_of(namespace: str, block: Stretch) -> dict[str, object]:
    """For `--json`: the place of a block in its prompt."""
    return {"namespace": namespace, "start": block.start, "end": block.end, "group": block.group,
            "known": block.known}  # fmt: skip


def may_clear(
    flags: argparse.Namespace, namespaces: Mapping[str, NamespaceStats], which: str
) -> bool:
    """Whether the namespace of the flags is there, and a person or `--yes` agrees to remove its
    blocks from `which`. Prints why not."""
    if flags.namespace is not None and flags.namespace not in namespaces:
        known = ", ".join(sorted(namespaces)) or "none"
        print_error(f"no namespace {flags.namespace!r}; known: {known}")
        return False
    about = [flags.namespace] if flags.namespace is not None else [*namespaces]
    num_blocks = sum(namespaces[name].total.blocks for name in about)
    if flags.yes or agreed(f"remove {num_blocks:,} blocks of {which}?"):
        return True
    print_error("nothing removed; --yes skips the question")
    return False


def to_clear(flags: argparse.Namespace, namespaces: Collection[str]) -> Sequence[str | None]:
    """The namespaces to name in a request each; None is all of them. Only a name is forgotten."""
    if flags.namespace is not None:
        return [flags.namespace]
    return [*namespaces] if flags.forget else [None]


def key_in(text: str, namespaces: Iterable[str]) -> bytes | None:
    """The key that `text` holds, unless a namespace begins with it."""
    if not text or any(name.startswith(text) for name in namespaces):
        return None
    try:
        return read_key(text)
    except ValueError:
        return None


def origin(block: Stretch) -> str:
    if not block.tokens:
        return "readable; its client sent no place in the prompt"
    request = {-1: "a request of unknown class", 0: "a first turn"}.get(
        block.known, f"a continued request, {block.known:,} tokens of which were known"
    )
    return f"tokens {block.start:,} to {block.end:,} of group {block.group}, put by {request}"


def where(copy: BlockCopy) -> str:
    if not copy.where:
        return copy.tier
    return f"{copy.tier}, for {duration(copy.age_s)}: {copy.where}"


def report(reply: StatsReply, known: list[str], gaps: list[Difference]) -> list[str]:
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


def summary_of(removed: Mapping[str, int]) -> str:
    """`removed`: blocks by tier."""
    counts = ", ".join(f"{count:,} from {tier}" for tier, count in removed.items())
    return f"removed blocks: {counts or 'none'}"


def facts_of(done: Kept, *, keep: bool) -> dict[str, int]:
    """For `--json`."""
    return {"kept" if keep else "let_go": done.kept, "bytes": done.bytes, "declined": done.declined}


def print_result(namespace: str, done: Kept, absent: int, *, keep: bool) -> None:
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
