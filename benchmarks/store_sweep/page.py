"""One HTML page of a sweep that needs nothing else: no script, no address, no file beside it."""

from collections.abc import Sequence
from html import escape

from benchmarks.harness.record import Record
from benchmarks.store_sweep import charts, conversation, source, spare
from benchmarks.store_sweep.operating import operating_points
from benchmarks.store_sweep.points import Percentiles, Result
from remote_server.config import format_bytes

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --ground: #fff; --line: #ccc; --soft: #f2f4f7 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --ground: #16181c; --line: #444; --soft: #22262c }
}
body { color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
svg { width: 100%; height: auto; color: var(--ink) }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap }
th { background: var(--soft) } td.words, th.words { text-align: left; white-space: normal }
code { background: var(--soft); padding: .1rem .3rem; overflow-wrap: anywhere }
"""


def render(
    record: Record, verdicts: Sequence[spare.Verdict], block_bytes: int, emulated: str
) -> str:
    """`verdicts` of at least one point. `emulated` says what of the storage was; empty for the
    ordinary server."""
    results = [one.result for one in verdicts]
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>kvferry: store sweep</title><style>{_STYLE}</style></head><body>",
        "<h1>How many conversations does a server carry?</h1>",
        _about(record, block_bytes, emulated),
        "<h2>What a lookup takes</h2>", charts.latency(results, "lookup"),
        f"<p>{escape(spare.conclusion(verdicts).capitalize())}.</p>",
        "<h2>What a read takes</h2>", charts.latency(results, "read"),
        "<h2>Throughput</h2>", charts.throughput(results),
        "<h2>Every point</h2>", _points(verdicts), _about_cores(),
        "<h2>Where to run it</h2>", _operating(results),
        "<h2>The source's own figures</h2>", _about_source(),
        _points(spare.verdicts(source.results(), source.CORES)),
        "</body></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _about(record: Record, block_bytes: int, emulated: str) -> str:
    stolen = f" The host gave {record.stolen_percent:g} % of the CPU time to other machines." if (
        record.stolen_percent) else ""  # fmt: skip
    storage = f"<p><strong>The storage is emulated:</strong> {escape(emulated)}.</p>" if (
        emulated) else ""  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return (
        f"<p>A conversation of {conversation.NUM_TURNS} turns is {conversation.LOOKUPS} lookups, "
        f"{conversation.READS} streamed reads and {conversation.WRITES} writes of blocks of "
        f"{conversation.BLOCK_TOKENS} tokens, {format_bytes(block_bytes)} each, booked as "
        f"{conversation.TOKENS_BOOKED:,} tokens. It moves {conversation.BLOCKS_MOVED} blocks: a "
        "read is of all blocks written before. Percentiles are of the samples of all clients "
        f"together.</p>{storage}"
        f"<p>{escape(record.describe_machine())}, {escape(record.started)}.{stolen}<br>"
        f"<code>{escape(record.command)}</code><br>{escape(versions)}</p>"
    )


def _about_source() -> str:
    return (
        f"<p>From {escape(source.LABEL)}; another machine, so compare shapes and not numbers. "
        "Three things in it are put right here. Its 512 bytes a block are the token ids: it moved "
        f"{source.BLOCK_BYTES:,} bytes. It averaged percentiles over its processes, which hides "
        "the slowest. Its capacity table allows 8x2 for reads below 30 ms though its 8x4 reads in "
        "25.96 ms.</p>"
    )


def _about_cores() -> str:
    return (
        "<p><em>Cores to spare</em>: at least half of them were idle, and one whole; clients run "
        "on the same ones. <em>Times</em>: a lookup's p50, of that with the fewest at once; up to "
        "1.25 is flat. <em>Server</em>: what its process used, of one core.</p>"
    )


def _points(verdicts: Sequence[spare.Verdict]) -> str:
    def cells(percentiles: Percentiles) -> list[str]:
        return ["-" if value is None else f"{value:.2f}" for value in percentiles]

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f} %"

    names = [f"{operation} {p}" for operation in ("lookup", "read", "write")
             for p in Percentiles._fields]  # fmt: skip
    rows = [
        [f"{r.point.concurrency} ({r.point})", f"{r.tps:.1f}", f"{r.tokens_per_s / 1e3:.1f}",
         *cells(r.lookup), *cells(r.read), *cells(r.write), str(r.errors),
         percent(r.cpu_percent), percent(r.server_percent), spare.in_words(to_spare),
         "-" if times is None else f"{times:.2f}"]
        for r, to_spare, times in verdicts
    ]  # fmt: skip
    return _table(["at once", "a second", "K tokens/s", *names, "errors", "CPU", "server",
                   "cores to spare", "times"], rows)  # fmt: skip


def _operating(results: Sequence[Result]) -> str:
    rows = [
        [one.profile, str(one.result.point), f"{one.result.tokens_per_s / 1e3:.1f}",
         f"{one.result.lookup.p50:.2f}", f"{one.result.read.p50:.2f}", one.rule]
        for one in operating_points(results)
    ]  # fmt: skip
    return _table(["profile", "at once", "K tokens/s", "lookup p50", "read p50", "rule"], rows,
                  words=(0, 5))  # fmt: skip


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(
            f'<{tag}{" class=words" if place in words else ""}>{escape(cell)}</{tag}>'
            for place, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>{line(headers, "th")}\n{body}</table></div>'
