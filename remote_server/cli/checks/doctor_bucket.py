"""Checks of `kvferry doctor` that concern the bucket: its address, its credential, and what a
running server has met there."""

import argparse
import os
import time
from collections.abc import Iterator
from typing import Any

from remote_server.cli.blocks.bucket import is_no_bucket, reason
from remote_server.cli.checks.doctor_fleet import Found
from remote_server.errors import ConfigError
from remote_server.protocol import StatsReply
from remote_server.server import settings
from remote_server.server.config import ServerConfig
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import Failure, Objects
from remote_server.store.bucket.objects.probe import Probed, probe

_EFFECTS = {
    "list": "packs are found one by one, and no sweep removes any",
    "write": "no pack is written",
    "read": "no pack is found",
    "delete": "old and damaged packs stay, and `kvferry clear` fails",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those that name the bucket, as the server's do."""
    parser.add_argument("--bucket", metavar="URL", help="check this bucket (KVFERRY_BUCKET)")
    parser.add_argument("--settings", metavar="FILE",
                        help="check that of this settings file (KVFERRY_SETTINGS)")  # fmt: skip
    parser.add_argument("--name", metavar="NAME", help="which server of that file")


def of_settings(flags: argparse.Namespace) -> Iterator[Found]:
    """Checks of the bucket that a server with these settings would use; nothing without one."""
    given: dict[str, Any] = dict.fromkeys(ServerConfig.__struct_fields__)
    given |= {"settings": flags.settings, "name": flags.name, "bucket": flags.bucket}
    try:
        url = settings.choose(argparse.Namespace(**given), os.environ).config.bucket
        if not url:
            return
        objects = StoreObjects(url, make=False)
    except ConfigError as error:
        yield "bad", str(error)
        return
    yield from _permissions(url, objects)


def _permissions(url: str, objects: Objects) -> Iterator[Found]:
    began = time.monotonic()
    probed = [*probe(objects)]
    took_ms = 1000 * (time.monotonic() - began)
    failed = [one for one in probed if one.failure is not None]
    if not failed:
        calls = ", ".join(one.call for one in probed)
        yield "ok", f"{url}: {calls} work, {took_ms:.0f} ms together"
    elif len(failed) == len(probed) or any(is_no_bucket(one.words) for one in failed):
        yield "bad", f"{url}: {_reason(failed[0])}; the server serves without it"
    else:
        for one in failed:
            rest = f"; {one.name} stays there" if one.call == "delete" else ""
            yield "bad", f"{url}: {one.call} fails: {_reason(one)}; {_EFFECTS[one.call]}{rest}"


def _reason(one: Probed) -> str:
    assert one.failure is not None
    return reason(one.failure, one.words)


def of_server(reply: StatsReply) -> Iterator[Found]:
    """What the server's own counts show of its bucket; nothing without one."""
    if "bucket" not in reply.tiers:
        return
    counters = reply.counters
    failed = ", ".join(
        f"{count:,} {failure}"
        for failure in Failure
        if failure is not Failure.ABSENT  # a pack that was known and is gone
        and (count := counters.get(f"bucket_failed_{failure}", 0))
    )
    hint = "its log has the store's words, and `kvferry doctor --bucket URL` tries each call"
    if reply.bucket is not None and reply.bucket.paused_s:
        yield (
            "bad",
            f"the server leaves it alone now: {reply.bucket.last_failure}; failed calls since the "
            f"start: {failed}; {hint}",
        )
    elif failed:
        yield "note", f"failed calls of the server since its start: {failed}; {hint}"
    elif not counters.get("bucket_listed"):
        yield "note", "the server has not listed it yet: packs are found one by one until then"
    else:
        yield "ok", f"the server knows {counters.get('bucket_names', 0):,} packs; no call failed"
