"""Prices of memory, disk and a bucket, in dollars: list prices, which every program takes as
options."""

from typing import NamedTuple

from remote_server.values import GiB

MONTH_S = 30 * 86_400

SWEEP_WRITES, SWEEP_READS = 3, 1
"""Requests of one sweep of a partition: two lists and the put of the clock are billed as puts; the
clock's get as a get. One namespace."""

GB = 10**9


class Prices(NamedTuple):
    """Of a bucket: list prices of S3 Standard, us-east-1, of 2025."""

    get: float = 0.0004
    """1,000 GETs and HEADs."""
    put: float = 0.005
    """1,000 PUTs and LISTs."""
    storage: float = 0.023
    """A GB-month, where the store's GB is 2^30 bytes."""


class BucketBill(NamedTuple):
    """Dollars."""

    requests: float
    storage: float

    @property
    def total(self) -> float:
        return self.requests + self.storage


def bucket_bill(
    prices: Prices, *, puts: float, gets: float, sweeps: float, byte_months: float
) -> BucketBill:
    """Of so many requests and bytes."""
    puts, gets = puts + sweeps * SWEEP_WRITES, gets + sweeps * SWEEP_READS
    return BucketBill(
        (puts * prices.put + gets * prices.get) / 1000, byte_months / GiB * prices.storage
    )
