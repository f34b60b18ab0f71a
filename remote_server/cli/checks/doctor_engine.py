"""Checks of `kvferry doctor` that concern an engine: by its `/metrics`, did it compute blocks that
the server had, because the server or the link was slow?"""

import argparse
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException

from remote_server.cli.checks.doctor_fleet import Found

SLOW = (
    "lookup_late", "lookup_paused", "budget_spent", "pool_busy", "bucket_slow", "late", "slow"
)  # fmt: skip
"""Reasons of `kvferry_missed_blocks` and outcomes of `kvferry_loaded_blocks`: the server may have
had the block, and the engine computed it because that took too long."""

WORTH_A_NOTE = 0.01
"""The share of such blocks from which on it is one."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", metavar="URL", action="append", default=[],
        help="check this engine by its metrics: http://127.0.0.1:8000 (repeatable)",
    )  # fmt: skip


def of_engines(flags: argparse.Namespace) -> Iterator[Found]:
    """One finding for each engine that is named."""
    from urllib.request import ProxyHandler, build_opener

    for url in flags.engine:
        address = url if "://" in url else f"http://{url}"
        page = address.rstrip("/")
        page = page if page.endswith("/metrics") else f"{page}/metrics"
        try:
            # No proxy: an engine is asked directly.
            with build_opener(ProxyHandler({})).open(page, timeout=flags.timeout_s) as reply:
                text = reply.read().decode()
            yield _finding(url, text)
        except (OSError, HTTPException, ValueError) as error:
            yield "bad", f"{url}: its metrics cannot be read: {getattr(error, 'reason', error)}"


def _finding(url: str, text: str) -> Found:
    from prometheus_client.parser import text_string_to_metric_families

    found, slow, is_ours = 0.0, Counter[str](), False
    for family in text_string_to_metric_families(text):
        is_ours |= family.name.startswith("kvferry_")
        for sample in family.samples:
            reason = sample.labels.get("reason") or sample.labels.get("outcome") or ""
            if sample.name == "kvferry_hit_blocks_total":
                found += sample.value
            elif reason in SLOW and sample.name in (
                "kvferry_missed_blocks_total", "kvferry_loaded_blocks_total"
            ):  # fmt: skip
                slow[reason] += int(sample.value)
    if not is_ours:
        return "bad", f"{url}: it has no metrics of kvferry; does it run with the connector?"
    given_up = slow.total()
    share = given_up / max(1.0, found + given_up)
    if share < WORTH_A_NOTE:
        return "ok", f"{url}: {found:,.0f} blocks found; {given_up:,} computed for slowness"
    reasons = ", ".join(f"{reason} {number:,}" for reason, number in slow.most_common() if number)
    return "note", (
        f"{url}: {share:.0%} of {found + given_up:,.0f} blocks were computed because the server or "
        f"the link was slow: {reasons}. `patience` is how long a request waits (docs/settings.md)"
    )
