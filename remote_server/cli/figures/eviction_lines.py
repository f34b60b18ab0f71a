"""Eviction that learns in the output of `kvferry stats`."""

from remote_server.protocol import StatsReply
from remote_server.values import format_bytes


def eviction_lines(reply: StatsReply) -> list[str]:
    """The rule, the reason for it, and the chances of another use."""
    eviction = reply.eviction
    if eviction is None:
        return []
    rates = ", ".join(f"{rule} {100 * rate:.1f} %" for rule, rate in eviction.found.items())
    switches = f"{eviction.switches:,} switch{'' if eviction.switches == 1 else 'es'}"
    lines = [
        f"{'eviction':<10} by {eviction.rule}; shadows find {rates}; {switches}; "
        f"takes {format_bytes(eviction.policy_bytes)}"
    ]
    title = "used again in"
    width = max(map(len, [title, *eviction.returns]))
    if eviction.returns:
        spans = "".join(f"  {f'{horizon_s / 60:g} min':>8}" for horizon_s in eviction.within_s)
        lines.append(f"{'':<10} {title:<{width}}{spans}")
    for name, chances in eviction.returns.items():
        shares = "".join(f"  {100 * chance:6.1f} %" for chance in chances)
        lines.append(f"{'':<10} {name:<{width}}{shares}")
    return lines
