"""`kvferry clear`, `pin` and `unpin` of a list of servers."""

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from remote_server.cli.blocks.blocks_lines import (
    facts_of,
    may_clear,
    print_result,
    summary_of,
    to_clear,
)
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.output import print_error, print_lines
from remote_server.cli.servers import connected_to_each, print_failed, some
from remote_server.client import RemoteClient
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import Kept
from remote_server.protocol.codec import ascii_json


def clear(servers: ServerList, flags: argparse.Namespace) -> int:
    """Exit status 1 when a server did not answer, whose blocks then remain."""
    with connected_to_each(servers, flags) as (each, replies):
        print_failed(replies.failed)
        namespaces = sum_of(replies.received).namespaces
        which = f"{len(replies.received):,} servers ({some(replies.received)})"
        if not may_clear(flags, namespaces, which):
            return 1
        removed: dict[str, Counter[str]] = {name: Counter() for name in replies.received}
        failed: dict[str, str] = {}
        for namespace in to_clear(flags, namespaces):
            cleared = each.ask(
                lambda one, about=namespace: one.clear(  # type: ignore[misc]
                    about, forget=flags.forget, timeout_s=flags.timeout_s
                ),
                flags.timeout_s,
                replies.received,
            )
            failed |= cleared.failed
            for name, of_one in cleared.received.items():
                removed[name].update(of_one.removed)
    done = {name: counts for name, counts in removed.items() if name not in failed}
    width = max(map(len, done), default=0)
    for name, counts in done.items():
        print_lines(f"{name:<{width}}  {summary_of(counts)}")
    print_failed(failed)
    missing = [one.name for one in servers.members if one.name not in done]
    if missing:
        print_error(
            f"not cleared: {', '.join(missing)}. Their blocks may be found again: repeat this "
            "when they answer"
        )
    return 1 if missing else 0


def pin(servers: ServerList, flags: argparse.Namespace, *, keep: bool) -> int:
    """A block that two servers have is pinned on both, and counts twice. Exit status 1 also when a
    server did not answer."""
    keys = [*dict.fromkeys(flags.keys)]
    kept: dict[str, Kept] = {}
    absent = 0
    with connected_to_each(servers, flags) as (each, replies):
        failed = dict(replies.failed)
        # A server counts keys and does not name them: one that no server has is seen only alone.
        one_by_one: list[list[bytes] | None] = [[key] for key in keys]
        for named in one_by_one or [None]:
            answers = each.ask(
                partial(_keep, namespace=flags.namespace, keys=named, keep=keep,
                        timeout_s=flags.timeout_s),
                flags.timeout_s,
                replies.received.keys() - failed.keys(),
            )  # fmt: skip
            failed |= answers.failed
            absent += not any(one.kept + one.declined for one in answers.received.values())
            for name, done in answers.received.items():
                kept[name] = _added(kept.get(name), done)
    total = Kept(request_id=0, epoch="", kept=0, bytes=0, declined=0)
    for done in kept.values():
        total = _added(total, done)
    absent = absent if keys else 0
    if flags.json:
        shown = {name: facts_of(done, keep=keep) for name, done in kept.items()}
        facts = facts_of(total, keep=keep) | {"absent": absent}
        print_lines(ascii_json(facts | {"servers": shown, "failed": failed}))
    else:
        print_result(flags.namespace, total, absent, keep=keep)
        did = "pinned" if keep else "unpinned"
        if len(names := [name for name, done in kept.items() if done.kept]) > 1:
            print_lines(*(f"  {name}: {did} {kept[name].kept:,}" for name in names))
    print_failed(failed)
    if failed:
        print_error(f"not asked: {', '.join(failed)}; repeat this when they answer")
    return 0 if total.kept and not total.declined and not failed else 1


def _keep(
    client: RemoteClient, namespace: str, keys: Sequence[bytes] | None, *, keep: bool,
    timeout_s: float,
) -> "Future[Kept]":  # fmt: skip
    return client.keep(namespace, keys, keep=keep, timeout_s=timeout_s)


def _added(one: Kept | None, other: Kept) -> Kept:
    if one is None:
        return other
    return Kept(
        request_id=0, epoch="", kept=one.kept + other.kept, bytes=one.bytes + other.bytes,
        declined=one.declined + other.declined,
    )  # fmt: skip
