"""Differences between the supported versions of vLLM, by feature and not by number."""

from contextlib import nullcontext
from typing import Any


def let_promotions_go_on(manager: Any) -> None:
    """End the time after a reset in which vLLM's `manager` asks no tier.

    vLLM 0.33 and newer hold promotions until the copies that a reset found under way have ended in
    all workers. A request that is looked up meanwhile is a miss, and computes its prompt. The
    caller holds the loads of our tier, the only one, for the same time: its lookups go on, and such
    a request waits.
    """
    flushed = getattr(manager, "on_reset_flushed", None)
    if flushed is not None:
        with getattr(manager, "lock", nullcontext()):
            flushed()
