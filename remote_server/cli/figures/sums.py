"""Sums of the statistics of several servers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from remote_server.protocol import (
    EngineState,
    FoundAt,
    NamespaceStats,
    StatsReply,
    TierShare,
    TierStats,
    WhatIf,
)
from remote_server.protocol.what_if_words import sound

# All servers may write to one bucket, each of which counts what it knows to be there.
_SHARED = "bucket"

_OCCUPANCY = ("budget_bytes", "used_bytes", "blocks", "pending", "pinned", "free_slabs", "kept")


def sum_of(replies: Mapping[str, StatsReply]) -> StatsReply:
    """The statistics of servers by name, as those of one. A block that several have counts in each;
    of a bucket, which they may share, the largest figure stands for it.

    The epoch is that of all: two sums with the same one are of the same boots of the same servers.
    """
    all_of = [*replies.values()]
    counters: Counter[str] = Counter()
    for reply in all_of:
        counters.update(reply.counters)
    tiers = dict.fromkeys(tier for reply in all_of for tier in reply.tiers)
    names = sorted({name for reply in all_of for name in reply.namespaces})
    return StatsReply(
        request_id=0,
        epoch=",".join(f"{name}={reply.epoch}" for name, reply in replies.items()),
        server="",
        uptime_s=sum(reply.uptime_s for reply in all_of) / max(len(all_of), 1),
        tiers={
            tier: _tier(tier, [one.tiers[tier] for one in all_of if tier in one.tiers])
            for tier in tiers
        },
        namespaces={
            name: _namespace([one.namespaces[name] for one in all_of if name in one.namespaces])
            for name in names
        },
        counters=dict(counters),
        engines=_engines(all_of),
        what_if=_what_if([what_if for one in all_of if (what_if := sound(one.what_if))]),
    )


def _engines(all_of: Sequence[StatsReply]) -> list[EngineState]:
    """An engine reports the same to every server, to some a little later."""
    latest: dict[tuple[str, str], EngineState] = {}
    for one in (engine for reply in all_of for engine in reply.engines):
        known = latest.get((one.namespace, one.client))
        if known is None or one.prompt_tokens > known.prompt_tokens:
            latest[one.namespace, one.client] = one
    return [*latest.values()]


def _what_if(all_of: Sequence[WhatIf]) -> WhatIf | None:
    """Of servers that all have so many times their size; without those whose rule, sizes or tiers
    are others than the first one's."""
    first = next(iter(all_of), None)
    if first is None:
        return None
    kind = first.rule, first.times, [*first.budgets]
    alike = [one for one in all_of if (one.rule, one.times, [*one.budgets]) == kind]
    names = sorted({name for one in alike for name in one.namespaces})
    return WhatIf(
        over_s=max(one.over_s for one in alike),
        times=first.times,
        budgets={
            tier: (max if tier == _SHARED else sum)(one.budgets[tier] for one in alike)
            for tier in first.budgets
        },
        rule=first.rule,
        seen_bytes=sum(one.seen_bytes for one in alike),
        model_bytes=sum(one.model_bytes for one in alike),
        total=_found_at([one.total for one in alike]),
        namespaces={
            name: _found_at([one.namespaces[name] for one in alike if name in one.namespaces])
            for name in names
        },
    )


def _found_at(all_of: Sequence[FoundAt]) -> FoundAt:
    """All tokens together: each server's shares count as often as it was asked."""
    asked = sum(one.asked for one in all_of)

    def mean(shares: Sequence[float]) -> float:
        parts = zip(all_of, shares, strict=True)
        return sum(one.asked * share for one, share in parts) / max(asked, 1)

    def curves(of: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
        return {
            tier: [mean(at) for at in zip(*(one[tier] for one in of), strict=True)]
            for tier in of[0]
        }

    tiers = dict.fromkeys(tier for one in all_of for tier in one.found)
    reasons = dict.fromkeys(reason for one in all_of for reason in one.missed)
    return FoundAt(
        asked=asked,
        found={tier: sum(one.found.get(tier, 0) for one in all_of) for tier in tiers},
        rule=curves([one.rule for one in all_of]),
        lru=curves([one.lru for one in all_of]),
        missed={
            reason: mean([one.missed.get(reason, 0.0) for one in all_of]) for reason in reasons
        },
    )


def _tier(tier: str, all_of: Sequence[TierStats]) -> TierStats:
    add = max if tier == _SHARED else sum
    return TierStats(**{name: add([getattr(one, name) for one in all_of]) for name in _OCCUPANCY})


def _namespace(all_of: Sequence[NamespaceStats]) -> NamespaceStats:
    """One namespace on several servers, with the engines of all."""
    tiers = dict.fromkeys(tier for one in all_of for tier in one.tiers)
    first = next((one for one in all_of if one.fingerprint), all_of[0])
    engines: dict[str, dict[str, str]] = {}
    for one in all_of:
        for engine, differs in one.engines.items():
            own = one.fingerprint | differs
            engines[engine] = {
                name: own.get(name, "")
                for name in {**first.fingerprint, **own}
                if own.get(name, "") != first.fingerprint.get(name, "")
            }
    return NamespaceStats(
        block_bytes=first.block_bytes,
        tiers={tier: _share(tier, [one.share(tier) for one in all_of]) for tier in tiers},
        client=first.client,
        fingerprint=first.fingerprint,
        engines=engines,
        forgotten=all(one.forgotten for one in all_of),
    )


def _share(tier: str, shares: Sequence[TierShare]) -> TierShare:
    if tier != _SHARED:
        return TierShare.sum_of(shares)
    return max(shares, key=lambda one: one.used_bytes)
