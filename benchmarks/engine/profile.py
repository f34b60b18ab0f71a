"""A profile of a batch: time in computing, between steps, in hooks, and in parallel copies."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.engine.driver import Batch, Span

COMPUTE, STORE, LOAD = "compute", "store", "load"


class Profile(NamedTuple):
    """Seconds and counts of one batch, or the medians of several."""

    seconds: float
    steps: float
    compute: float
    """In the model's steps."""

    between: float
    """Outside of the model: scheduling, hooks, and all waiting of requests."""

    ours: float
    vllms: float
    copying: float
    beside: float
    """The part of the copying during which the model computed."""

    @property
    def overlap(self) -> float:
        """The fraction of the copying that delayed no step."""
        return self.beside / self.copying if self.copying else 1.0

    def describe(self) -> str:
        text = (
            f"{self.seconds * 1e3:.1f} ms in {self.steps:g} steps: {self.compute * 1e3:.1f} "
            f"computing, {self.between * 1e3:.1f} between steps"
        )
        if self.ours or self.vllms:
            text += (
                f", of which {self.ours * 1e3:.1f} in our hooks and {self.vllms * 1e3:.1f} in "
                f"vLLM's; {self.copying * 1e3:.1f} copying, {self.overlap:.0%} of it beside "
                "computing"
            )
        return text


def profile(batch: Batch, spans: Sequence[Span]) -> Profile:
    """The profile of a batch and of the worker's activity in its time."""
    computed = merge((span.began_s, span.ended_s) for span in spans if span.what == COMPUTE)
    copies = [span for span in spans if span.what in (STORE, LOAD)]
    compute = sum(ended - began for began, ended in computed)
    return Profile(
        batch.seconds, batch.steps, compute, max(0.0, batch.seconds - compute),
        batch.hooks_s.get("ours", 0.0), batch.hooks_s.get("vLLM's", 0.0),
        sum(span.ended_s - span.began_s for span in copies),
        sum(within(span.began_s, span.ended_s, computed) for span in copies),
    )  # fmt: skip


def merge(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The time that any of the spans covers, as spans that do not touch, in order."""
    merged: list[tuple[float, float]] = []
    for began, ended in sorted(spans):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged


def within(began: float, ended: float, spans: Sequence[tuple[float, float]]) -> float:
    """Seconds of began…ended inside `spans`, which do not touch each other."""
    return sum(max(0.0, min(ended, last) - max(began, first)) for first, last in spans)


def median(profiles: Sequence[Profile]) -> Profile:
    """Field by field; at least one profile."""
    middle = [sorted(values)[len(values) // 2] for values in zip(*profiles, strict=True)]
    return Profile(*middle)
