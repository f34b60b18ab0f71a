"""`kvferry bucket`: what a bucket holds, and whether it is intact; removal of a namespace.

The commands work on the bucket itself, and need no server. Credentials come from the environment,
as a server's do.
"""

import argparse
import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import nlargest
from itertools import islice
from typing import Any

from remote_server.cli.flags import add_json
from remote_server.cli.output import agreed, duration, print_error, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.progress import Progress
from remote_server.errors import KVFerryError
from remote_server.protocol.codec import ascii_json
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.upkeep import survey
from remote_server.store.bucket.upkeep.survey import PackObject
from remote_server.values import format_bytes, whole_number

SHOWN_PACKS = 20

_REASONS = {
    Failure.ABSENT: "there is no such bucket",
    Failure.FORBIDDEN: "the credential is missing, has expired or may not do this",
    Failure.THROTTLED: "the store has too many requests; try again later",
    Failure.TIMEOUT: "no answer in time",
    Failure.UNREACHABLE: "no connection",
    Failure.SHORT: "an answer was cut off",
    Failure.OTHER: "the store failed",
}

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist", re.IGNORECASE)


def is_no_bucket(words: str) -> bool:
    """Whether the words of a store report that the bucket itself is missing."""
    return _NO_BUCKET.search(words) is not None


def reason(failure: Failure, words: str) -> str:
    """A failure of the store in one clause, with the store's words."""
    if is_no_bucket(words):
        failure = Failure.ABSENT
    return f"{_REASONS[failure]} ({words})"


def add_flags(parser: Parser) -> None:
    below = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = _add_one(below, "ls", "the namespaces, or the packs of one, newest first", _ls)
    ls.add_argument("namespace", nargs="?", metavar="NAMESPACE", help="list its packs")
    ls.add_argument("--limit", type=_count, default=SHOWN_PACKS, metavar="COUNT",
                    help="the most packs to list (default: %(default)s)")  # fmt: skip
    _add_one(below, "du", "packs, bytes and ages of each namespace", _du)
    rm = _add_one(below, "rm", "remove all packs of a namespace", _rm)
    rm.add_argument("namespace", metavar="NAMESPACE", help="whose packs are removed")
    rm.add_argument("--yes", action="store_true", help="skip the question")
    verify = _add_one(below, "verify", "read packs, and check every row", _verify)
    verify.add_argument("namespace", nargs="?", metavar="NAMESPACE", help="only its packs")
    verify.add_argument("--sample", type=_count, metavar="COUNT", help="so many, by chance")
    verify.add_argument("--remove", action="store_true", help="remove the damaged ones")


def _add_one(
    below: Any, name: str, text: str, act: Callable[[Objects, argparse.Namespace], int]
) -> Parser:
    description = f"{text[:1].upper()}{text[1:]}."
    parser: Parser = below.add_parser(name, help=text, description=description)
    parser.add_argument("url", metavar="URL", help="s3://bucket/prefix, gs://, az:// or file:///")
    parser.add_argument("--tenant", default="", metavar="NAME", help="of a server with tenants")
    add_json(parser)
    parser.set_defaults(act=act)
    return parser


def _count(text: str) -> int:
    try:
        if (number := whole_number(text)) > 0:
            return number
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number above zero")


def _nothing(objects: Objects, flags: argparse.Namespace, namespace: str | None) -> int:
    """Print that there are no packs, and what there is instead."""
    if namespace is not None:
        known = ", ".join(survey.namespaces(objects, flags.tenant)) or "none"
        print_error(f"{flags.url} has no packs of {namespace!r}; namespaces with packs: {known}")
        return 1
    others = [name for name in survey.tenants(objects) if name != flags.tenant]
    whose = f" of tenant {flags.tenant!r}" if flags.tenant else ""
    more = "; `--tenant` shows those of " + ", ".join(map(repr, others)) if others else ""
    print_error(f"{flags.url} has no packs{whose}{more}")
    return 1


# ── ls, du ───────────────────────────────────────────────────────────────────────────────


def _ls(objects: Objects, flags: argparse.Namespace) -> int:
    if flags.namespace is not None:
        return _ls_packs(objects, flags)
    found = survey.namespaces(objects, flags.tenant)
    if flags.json:
        print_lines(ascii_json({"namespaces": found}))
    elif found:
        print_lines(*found)
    return 0 if found else _nothing(objects, flags, None)


def _ls_packs(objects: Objects, flags: argparse.Namespace) -> int:
    total = 0

    def counted() -> Iterable[PackObject]:
        nonlocal total
        with Progress(quiet=flags.json) as progress:
            for pack in survey.packs(objects, flags.tenant, flags.namespace):
                total += 1
                progress.show(f"{total:,} packs")
                yield pack

    newest = nlargest(flags.limit, counted(), key=lambda pack: pack.modified)
    if not newest:
        return _nothing(objects, flags, flags.namespace)
    now = survey.clock(objects, flags.tenant, newest[0].modified)
    rows = [
        (pack.key.hex(), checked, pack.num_bytes, now - pack.modified)
        for pack, checked in survey.at_once(partial(survey.num_rows, objects), newest)
    ]
    if flags.json:
        shown = [{"key": key, "rows": checked.rows, "bytes": num_bytes, "age_s": age,
                  "damage": checked.damage or checked.words}
                 for key, checked, num_bytes, age in rows]  # fmt: skip
        print_lines(ascii_json({"packs": shown, "total": total}))
        return 0
    table = [("key", "rows", "size", "age")] + [
        (key, f"{checked.rows:,}" if checked.rows else checked.damage or checked.words,
         format_bytes(num_bytes), duration(age))
        for key, checked, num_bytes, age in rows
    ]  # fmt: skip
    print_lines(*_aligned(table))
    if total > len(rows):
        print_lines(f"the newest {len(rows):,} of {total:,} packs; --limit COUNT lists more")
    return 0


def _du(objects: Objects, flags: argparse.Namespace) -> int:
    by_name: dict[str, list[float]] = {}  # packs, bytes, dates of the oldest and the newest
    with Progress(quiet=flags.json) as progress:
        for number, pack in enumerate(survey.packs(objects, flags.tenant), 1):
            one = by_name.setdefault(pack.namespace, [0, 0, pack.modified, pack.modified])
            one[0] += 1
            one[1] += pack.num_bytes
            one[2], one[3] = min(one[2], pack.modified), max(one[3], pack.modified)
            progress.show(f"{number:,} packs")
    if not by_name and not flags.json:
        return _nothing(objects, flags, None)
    every = by_name.values()
    now = 0.0
    if by_name:
        now = survey.clock(objects, flags.tenant, max(one[3] for one in every))
    packs, num_bytes = (int(sum(one[place] for one in every)) for place in (0, 1))
    if flags.json:
        shown = {name: {"packs": int(one[0]), "bytes": int(one[1]), "oldest_s": now - one[2],
                        "newest_s": now - one[3]}
                 for name, one in by_name.items()}  # fmt: skip
        print_lines(ascii_json({"namespaces": shown, "packs": packs, "bytes": num_bytes}))
        return 0 if by_name else 1
    total = [packs, num_bytes, min(one[2] for one in every), max(one[3] for one in every)]
    table = [("namespace", "packs", "size", "newest", "oldest")] + [
        (name, f"{int(one[0]):,}", format_bytes(int(one[1])), duration(now - one[3]),
         duration(now - one[2]))
        for name, one in [*sorted(by_name.items()), ("all", total)]
    ]  # fmt: skip
    print_lines(*_aligned(table))
    return 0


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0])]
                  + [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)])
        for row in table
    ]  # fmt: skip


# ── rm ───────────────────────────────────────────────────────────────────────────────────


def _rm(objects: Objects, flags: argparse.Namespace) -> int:
    found = [*survey.packs(objects, flags.tenant, flags.namespace)]
    if not found:
        return _nothing(objects, flags, flags.namespace)
    size = format_bytes(sum(pack.num_bytes for pack in found))
    if not flags.yes and not agreed(f"remove {len(found):,} packs, {size}, from {flags.url}?"):
        print_error("nothing removed; --yes skips the question")
        return 1
    done = survey.Removed(0, 0, len(found))
    try:
        with Progress(quiet=flags.json) as progress:
            for done in survey.remove(objects, found):
                progress.show(f"removed {done.packs:,} of {len(found):,} packs")
    finally:  # also after Ctrl-C
        if flags.json:
            print_lines(ascii_json({"removed": done.packs, "bytes": done.num_bytes,
                                    "left": done.left, "error": done.words}))  # fmt: skip
        else:
            print_lines(f"removed {done.packs:,} packs, {format_bytes(done.num_bytes)}")
    if done.left:
        print_error(f"{done.left:,} packs are left: {done.words}; run it again")
    elif not flags.json:
        print_lines("a running server still holds its blocks in memory and on disk, and may write "
                    "them again: `kvferry clear` on each removes them there")  # fmt: skip
    return 1 if done.left else 0


# ── verify ───────────────────────────────────────────────────────────────────────────────


def _verify(objects: Objects, flags: argparse.Namespace) -> int:
    found: Iterable[PackObject] = survey.packs(objects, flags.tenant, flags.namespace)
    if flags.sample:
        found = _sample(found, flags.sample)
    num, num_bytes = 0, 0
    damaged: list[tuple[PackObject, str]] = []
    unread: list[tuple[PackObject, str]] = []
    with Progress(quiet=flags.json) as progress:
        for pack, checked in survey.at_once(partial(survey.check, objects), found):
            if checked.failure is Failure.ABSENT:
                continue  # removed since it was listed
            num, num_bytes = num + 1, num_bytes + pack.num_bytes
            if checked.failure is not None:
                unread.append((pack, reason(checked.failure, checked.words)))
            elif checked.words:
                unread.append((pack, checked.words))
            elif checked.damage:
                damaged.append((pack, checked.damage))
            progress.show(f"{num:,} packs, {format_bytes(num_bytes)}, {len(damaged):,} damaged")
    if not num:
        return _nothing(objects, flags, flags.namespace)
    removed = survey.Removed(0, 0, 0)
    if flags.remove and damaged:
        *_, removed = survey.remove(objects, [pack for pack, _ in damaged])
    if flags.json:
        print_lines(ascii_json({
            "packs": num, "bytes": num_bytes, "damaged": _named(damaged), "unread": _named(unread),
            "removed": removed.packs,
        }))  # fmt: skip
    else:
        for verdict, some in (("damaged", damaged), ("unread", unread)):
            for pack, why in some:
                print_lines(f"{verdict}  {pack.namespace}  {pack.key.hex()}  {why}")
        _print_end(flags, num, num_bytes, len(damaged), len(unread), removed)
    return 1 if damaged or unread else 0


def _print_end(
    flags: argparse.Namespace,
    num: int,
    num_bytes: int,
    damaged: int,
    unread: int,
    removed: survey.Removed,
) -> None:
    intact = num - damaged - unread
    print_lines(f"{intact:,} of {num:,} packs are intact, {format_bytes(num_bytes)} read")
    if removed.left:
        print_error(f"{removed.left:,} damaged packs are left: {removed.words}")
    elif removed.packs:
        print_lines(f"removed {removed.packs:,} damaged packs")
    elif damaged:
        print_lines("a server never uses a damaged row; `--remove` removes these packs")


def _named(some: list[tuple[PackObject, str]]) -> list[dict[str, str]]:
    return [
        {"namespace": pack.namespace, "key": pack.key.hex(), "reason": why} for pack, why in some
    ]


def _sample(found: Iterable[PackObject], count: int) -> list[PackObject]:
    """`count` of them, each as likely as any other."""
    chosen, rest = [*islice(found := iter(found), count)], enumerate(found, count + 1)
    for number, pack in rest:
        if (place := random.randrange(number)) < count:
            chosen[place] = pack
    return chosen


def run(flags: argparse.Namespace) -> int:
    """Of the action in `flags`."""
    try:
        act: Callable[[Objects, argparse.Namespace], int] = flags.act
        return act(StoreObjects(flags.url, make=False), flags)
    except BucketError as error:
        raise KVFerryError(
            f"{flags.url}: {reason(error.failure, str(error))}; "
            f"`kvferry doctor --bucket {flags.url}` checks each permission"
        ) from error


COMMAND = Command(
    add_flags,
    run,
    description="Work on the bucket itself, without a server. Credentials come from the "
    "environment. Exit status 1 when nothing was found, when a pack is damaged, or when the store "
    "fails.",
    examples="""\
kvferry bucket ls s3://kv-cache/prod
kvferry bucket du file:///mnt/kv
kvferry bucket verify s3://kv-cache/prod --sample 100
""",
)
