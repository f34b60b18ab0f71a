"""Many short operations as rows and figures of a record: a round is `repeats` of them in turns
with the others, and a row has the median of each round."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.harness.record import Figure
from benchmarks.harness.runner import Sample
from benchmarks.harness.statistics import compare_pairs, percentile
from benchmarks.remote_kv_cache.work.results import Variant

MEDIAN, P99, TIMES = "median", "p99", "times memcached"


def folded(sample: Sample, repeats: int) -> Sample:
    """The sample with one value a whole round. An interrupted round counts if there is no other."""
    return replace(
        sample, values=_medians(sample.values, repeats), warm_ups=_medians(sample.warm_ups, repeats)
    )


def _medians(values: list[float], repeats: int) -> list[float]:
    whole = len(values) // repeats * repeats
    kept = values[:whole] or values
    return [percentile(kept[first : first + repeats], 50) for first in range(0, len(kept), repeats)]


def figures(
    size: str, samples: Mapping[Variant, Sample], repeats: int, bases: Mapping[str, Variant]
) -> list[Figure]:
    """Median and p99 of all operations of each way that was measured, in us, and its time as a
    multiple of its base's, with the interval over the rounds."""
    return [
        _figure(f"{size}: {variant.operation}", variant.transport, sample, repeats,
                samples.get(bases[variant.operation]) if variant.operation in bases else None)
        for variant, sample in samples.items()
        if sample.measured
    ]  # fmt: skip


def _figure(
    name: str, transport: str | None, sample: Sample, repeats: int, base: Sample | None
) -> Figure:
    us = [value * 1e6 for value in sample.values]
    values = {MEDIAN: percentile(us, 50), P99: percentile(us, 99)}
    if base is not None and base.measured:
        mine, other = folded(sample, repeats).values, folded(base, repeats).values
        rounds = min(len(mine), len(other))
        times = compare_pairs(mine[:rounds], other[:rounds])
        values |= {TIMES: times.ratio, "low": times.low, "high": times.high, "rounds": times.rounds}
    return Figure(name, "us", values, transport, {MEDIAN: _medians(us, repeats)})
