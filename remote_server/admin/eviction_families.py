"""Metrics of eviction that learns."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from remote_server.protocol import EvictionStats

_P = "kvferry_server_eviction_"


def eviction_families(by_tenant: Mapping[str, EvictionStats]) -> Iterator[Metric]:
    """Every metric of the policy, by tenant; without one that learns, families without samples."""
    rules = _gauge("rule", "1 for the rule that orders blocks now, 0 for the other.", "rule")
    found = _gauge(
        "found_ratio", "Share of sampled keys that the shadow of each rule found of late.", "rule"
    )
    returns = _gauge(
        "return_ratio",
        "Chance that a block just used is used again within so many seconds, by turn of its "
        "conversation and hint.",
        "class", "within_s",
    )  # fmt: skip
    held = _gauge("bytes", "Memory that the policy takes beside the index, about.")
    switches = CounterMetricFamily(_P + "switches", "Changes of the rule.", labels=["tenant"])
    for tenant, stats in by_tenant.items():
        for rule, rate in stats.found.items():
            rules.add_metric([tenant, rule], rule == stats.rule)
            found.add_metric([tenant, rule], rate)
        for name, chances in stats.returns.items():
            for horizon_s, chance in zip(stats.within_s, chances, strict=True):
                returns.add_metric([tenant, name, f"{horizon_s:g}"], chance)
        held.add_metric([tenant], stats.policy_bytes)
        switches.add_metric([tenant], stats.switches)
    yield from (rules, found, switches, returns, held)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_P + name, text, labels=["tenant", *labels])
