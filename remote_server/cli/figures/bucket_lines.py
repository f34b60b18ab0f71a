"""The bucket in the output of `kvferry stats`."""

from remote_server.cli.figures.changes import seconds_since
from remote_server.cli.output import duration
from remote_server.histograms import percentile
from remote_server.protocol import BucketCalls, StatsReply
from remote_server.values import format_bytes

_GOOD = ("ok", "existed", "absent")


def bucket_lines(reply: StatsReply, before: StatsReply | None) -> list[str]:
    """The lines of a server with a bucket. With an earlier reply `before`, calls are those since
    then."""
    bucket = reply.bucket
    if bucket is None:
        return []
    state = "answers"
    if bucket.paused_s:
        state = f"left alone for {duration(bucket.paused_s)}, because its calls fail"
    can = "" if bucket.writable_bytes is None else (
        f"; {format_bytes(bucket.writable_bytes)} may be written now"
    )  # fmt: skip
    lines = [
        "",
        f"{'bucket':<10} {state}",
        f"{'':<10} {bucket.names:,} packs known, {bucket.packs_waiting:,} wait to be written{can}",
    ]
    if bucket.last_failure:
        ago = duration(bucket.last_failure_s)
        lines.append(f"{'':<10} last failure, {ago} ago: {bucket.last_failure}")
    counters = reply.counters
    if counters.get("get_hit"):
        share = 100 * counters.get("hits_bucket", 0) / counters["get_hit"]
        lines.append(f"{'':<10} {share:.1f} % of the blocks that were got came from it")
    since = before.bucket if before is not None and before.epoch == reply.epoch else None
    took_s = seconds_since(reply, before) if since is not None else 0.0
    table = [
        _line(kind, calls, since.calls.get(kind) if since is not None else None, took_s)
        for kind, calls in bucket.calls.items()
        if calls.results
    ]
    if table:
        per = "calls/s" if took_s else "calls"
        lines += ["", f"{'call':<8}  {per:>10}  {'failed':>8}  {'bytes':>12}  {'median':>8}  p99"]
    return [*lines, *table, ""]


def _line(kind: str, calls: BucketCalls, since: BucketCalls | None, took_s: float) -> str:
    num, failed, num_bytes = _sums(calls)
    counts = calls.times.counts
    if since is None or not took_s:
        rate, moved = f"{num:,}", format_bytes(num_bytes)
    else:
        num_then, failed_then, bytes_then = _sums(since)
        failed -= failed_then
        rate = f"{(num - num_then) / took_s:,.1f}"
        moved = f"{format_bytes(int((num_bytes - bytes_then) / took_s))}/s"
        counts = [now - then for now, then in zip(counts, since.times.counts, strict=False)]
    median, p99 = (_time(percentile(counts, percent)) for percent in (50, 99))
    moved = moved if calls.num_bytes else ""
    return f"{kind:<8}  {rate:>10}  {failed:>8,}  {moved:>12}  {median:>8}  {p99}"


def _sums(calls: BucketCalls) -> tuple[int, int, int]:
    """All calls, those that failed, and the bytes."""
    num = sum(calls.results.values())
    return num, num - sum(calls.results.get(result, 0) for result in _GOOD), calls.num_bytes


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
