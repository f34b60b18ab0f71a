"""Explained curves: what other sizes of the tiers would find, as the page shows it."""

from collections.abc import Iterable
from typing import Any

import msgspec

from remote_server.protocol import EngineState, WhatIf
from remote_server.protocol.what_if_words import (
    LEAST,
    LEAST_TOKENS,
    enough_bytes,
    found_share,
    levels_off,
    reason_words,
    sentences,
    speed_of,
)
from remote_server.server.reports.snapshot import Snapshot


def explained(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """By tenant, the fields of its `WhatIf` and what follows from them.

    `concludes` is whether there are enough tokens for that, `found` the share of them that some
    tier had, and `reasons` the shares and words of the others: together they are 1. `tiers` has for
    each tier its `sentences`, and `enough`: the size from which more brings less than 1 %, and the
    share found there; None where there is none.
    """
    return {
        tenant: _explained(one, _engines_of(tenant, snapshot.engines))
        for tenant, one in snapshot.what_if.items()
    }


def _explained(what_if: WhatIf, engines: Iterable[EngineState]) -> dict[str, Any]:
    tokens_per_s, concludes = speed_of(engines), what_if.total.asked >= LEAST_TOKENS
    return {
        **msgspec.to_builtins(what_if),
        "concludes": concludes,
        "found": found_share(what_if.total),
        "reasons": [
            {"share": share, "words": words} for share, words in reason_words(what_if.total)
        ],
        "tiers": {
            tier: {
                "sentences": sentences(what_if, tier, tokens_per_s),
                "enough": _enough(what_if, tier) if concludes else None,
            }
            for tier in what_if.budgets
        },
    }


def _enough(what_if: WhatIf, tier: str) -> dict[str, float] | None:
    shares = what_if.total.rule[tier]
    if not levels_off(shares):
        return None
    enough = enough_bytes(what_if.times, shares, what_if.budgets[tier])
    return {"bytes": enough, "share": max(shares[0], shares[-1] - LEAST)}


def _engines_of(tenant: str, engines: Iterable[EngineState]) -> list[EngineState]:
    return [one for one in engines if not tenant or one.namespace.startswith(f"{tenant}/")]
