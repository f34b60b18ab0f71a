"""Changes between two replies of a server, or two sums of several."""

from collections.abc import Iterator

from remote_server.protocol import StatsReply
from remote_server.values import format_bytes

FLOWS = (
    ("in", ("bytes_in", "shared_bytes_in", "lane_bytes_in")),
    ("out", ("bytes_out", "shared_bytes_out", "lane_bytes_out")),
    ("to disk", ("disk_written_bytes",)),
    ("from disk", ("disk_read_bytes",)),
    ("to bucket", ("bucket_written_bytes",)),
    ("from bucket", ("bucket_read_bytes",)),
)


def seconds_since(reply: StatsReply, before: StatsReply | None) -> float:
    """The time since `before`; 0 if there is none, or the server has been restarted since."""
    if before is None or before.epoch != reply.epoch:
        return 0.0
    return max(reply.uptime_s - before.uptime_s, 1e-3)


def grown(reply: StatsReply, before: StatsReply | None) -> dict[str, int]:
    """How much each counter has grown since `before`; empty without that time."""
    if before is None or before.epoch != reply.epoch:
        return {}
    return {name: count - before.counters.get(name, 0) for name, count in reply.counters.items()}


def flows(reply: StatsReply, before: StatsReply | None) -> Iterator[tuple[str, int, str]]:
    """Each flow: its bytes in all, and those in a second since `before`, as text; "" without that
    time."""
    now, seconds = grown(reply, before), seconds_since(reply, before)
    for name, parts in FLOWS:
        total = sum(reply.counters.get(part, 0) for part in parts)
        moved = sum(now.get(part, 0) for part in parts)
        yield name, total, f"{format_bytes(int(moved / seconds))}/s" if seconds else ""
