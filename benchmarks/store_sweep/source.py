"""The source's figures: its server on 80 virtual cores, with a cloud's blob storage behind it.

A row for each point of its table: concurrency, iterations a second, thousands of tokens a second,
and p50, p90, p99 of lookups and of reads in milliseconds. The source reports 512 bytes a block;
those are 128 token ids, and the moved payloads had 1,258,291 bytes.
"""

from benchmarks.store_sweep.points import Percentiles, Point, Result

LABEL = "the source, 80 virtual cores, blob storage"
BLOCK_BYTES = 1_258_291
CORES = 80

_ROWS = (
    (1, 3.6, 4.1, (4.95, 8.08, 11.16), (18.81, 20.75, 22.84)),
    (2, 7.4, 8.5, (4.84, 7.91, 11.07), (19.17, 21.24, 25.51)),
    (4, 14.6, 16.8, (4.72, 7.67, 10.80), (19.60, 22.06, 32.24)),
    (6, 22.0, 25.3, (4.63, 7.55, 11.92), (20.19, 22.71, 28.79)),
    (8, 28.8, 33.2, (4.72, 7.49, 12.07), (20.61, 23.52, 35.80)),
    (16, 47.6, 54.8, (4.56, 7.33, 11.44), (22.29, 27.95, 43.36)),
    (32, 65.8, 75.8, (4.68, 6.46, 12.49), (25.96, 39.86, 69.17)),
    (64, 80.5, 92.7, (5.23, 9.02, 23.54), (41.97, 83.60, 157.82)),
    (80, 81.5, 93.9, (5.63, 11.54, 28.65), (57.04, 104.81, 166.90)),
)


def results() -> list[Result]:
    """The source's table. Values that it lacks (p100, writes) are None."""
    return [
        Result(
            Point.of(concurrency), tps, 1e3 * thousands,
            Percentiles(*lookup, None), Percentiles(*read, None),
        )
        for concurrency, tps, thousands, lookup, read in _ROWS
    ]  # fmt: skip
