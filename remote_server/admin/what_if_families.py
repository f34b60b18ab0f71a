"""Metrics of what other sizes of the tiers would find, and of why tokens were not found."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from remote_server.protocol import WhatIf

_P = "kvferry_server_"


def what_if_families(by_tenant: Mapping[str, WhatIf]) -> Iterator[Metric]:
    """Every metric of the curves, by tenant. All are gauges: counts older than a day are forgotten.
    Shares have no samples before the first request."""
    would = _gauge(
        "what_if_found_ratio",
        "Share of tokens that a tier of so many times its size would find, by rule.",
        "tier", "times", "rule",
    )  # fmt: skip
    asked = _gauge("what_if_asked_tokens", "Tokens looked up, of these shares.")
    held = _gauge("what_if_bytes", "Memory of the models of other sizes, about.")
    found = _gauge(
        "found_tokens_ratio", "Share of tokens found in a tier and in none above it.", "tier"
    )
    missed = _gauge(
        "missed_tokens_ratio", "Share of tokens not found; with the found ones 1.", "reason"
    )
    for tenant, stats in by_tenant.items():
        asked.add_metric([tenant], stats.total.asked)
        held.add_metric([tenant], stats.model_bytes)
        if stats.total.asked:
            _add_shares(would, tenant, stats)
            for tier, share in _found_in(stats).items():
                found.add_metric([tenant, tier], share)
            for reason, share in stats.total.missed.items():
                missed.add_metric([tenant, reason], share)
    yield from (would, asked, held, found, missed)


def _add_shares(would: GaugeMetricFamily, tenant: str, stats: WhatIf) -> None:
    for rule, by_tier in (("in_force", stats.total.rule), ("lru", stats.total.lru)):
        for tier, shares in by_tier.items():
            for times, share in zip(stats.times, shares, strict=True):
                would.add_metric([tenant, tier, f"{times:g}", rule], share)


def _found_in(stats: WhatIf) -> dict[str, float]:
    """By tier, the share that it had and those above it lacked."""
    above, shares = 0, {}
    for tier, tokens in sorted(stats.total.found.items(), key=lambda one: one[1]):
        shares[tier] = (tokens - above) / stats.total.asked
        above = tokens
    return shares


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_P + name, text, labels=["tenant", *labels])
