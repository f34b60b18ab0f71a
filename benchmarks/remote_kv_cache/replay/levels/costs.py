"""The price of a million prompts' requests and bytes in a bucket."""

from typing import NamedTuple

from benchmarks.remote_kv_cache.replay.levels.points import Point
from remote_server.traces.prices import SWEEP_READS, SWEEP_WRITES, Prices
from remote_server.values import GiB

LISTED = "list price of S3 Standard, us-east-1, of 2025"

PRICES = Prices()
PRICED = {
    "get": "dollars a 1,000 GETs and HEADs",
    "put": "dollars a 1,000 PUTs and LISTs",
    "storage": "dollars a GB-month",
}


class Cost(NamedTuple):
    """Dollars a million prompts."""

    put: float
    get: float
    header: float
    sweep: float
    storage: float
    """Of what a million prompts write, kept for the bucket's days; 0 where it is never removed."""

    @property
    def total(self) -> float:
        return sum(self)


def cost_of(point: Point, prices: Prices, days: float) -> Cost:
    """The cost of a replay with a bucket."""
    use = point.bucket
    assert use is not None and point.requests
    times = 1e6 / point.requests
    sweeps = use.requests["sweep"] / 1000
    gb_months = use.written_bytes / GiB * days / 30
    return Cost(
        times * use.requests["put"] / 1000 * prices.put,
        times * use.requests["get"] / 1000 * prices.get,
        times * use.requests["header"] / 1000 * prices.get,
        times * sweeps * (SWEEP_WRITES * prices.put + SWEEP_READS * prices.get),
        times * gb_months * prices.storage,
    )
