"""The HTML page of a sweep, self-contained: no address, no second file, and one script without
which it is complete."""

from collections.abc import Sequence
from html import escape

from benchmarks.harness.pages import html
from benchmarks.harness.record import Record
from benchmarks.store_sweep import source, spare
from benchmarks.store_sweep.load import conversation
from benchmarks.store_sweep.operating import WithinSla, operating_points
from benchmarks.store_sweep.pages import charts, interactive, printed
from benchmarks.store_sweep.points import PARTS, Percentiles, Result
from remote_server.values import format_bytes

_STYLE = """
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
svg { width: 100%; min-width: 34rem; height: auto; color: var(--ink) }
.wide { overflow-x: auto }
table { width: 100% }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap }
th { background: var(--soft) } td.words:last-child { min-width: 15rem }
td.words, th.words { text-align: left; white-space: normal }
code { background: var(--soft); padding: .1rem .3rem }
"""


def render(
    record: Record, verdicts: Sequence[spare.Verdict], slas: Sequence[WithinSla], block_bytes: int
) -> str:
    """`verdicts` of at least one point. The record's parameters may have an emulated storage, the
    servers, and the conclusion on the network."""
    results = [one.result for one in verdicts]
    parts = [
        "<h1>How many conversations does a server carry?</h1>",
        _about(record, block_bytes),
        "<h2>Duration of a lookup</h2>", _chart(charts.latency(results, "lookup"), "lookups"),
        f"<p>{escape(spare.conclusion(verdicts))}</p>",
        "<h2>Duration of a read</h2>", _chart(charts.latency(results, "read"), "reads"),
        *_split(results),
        "<h2>Throughput</h2>", _chart(charts.throughput(results), "throughput"),
        f"<p>{escape(str(record.parameters.get('network', '')))}</p>",
        "<h2>The best configuration for a limit on reads</h2>", _about_slas(), _slas(slas),
        "<h2>Every point</h2>", _points(results),
        "<h2>Use of the machine, and other figures</h2>", _about_cores(), _rest(verdicts),
        "<h2>Where to run it</h2>", _operating(results),
        "<h2>The source's own figures</h2>", _about_source(),
        _points(source.results()),
        f"<script>{interactive.SCRIPT}</script>",
    ]  # fmt: skip
    return html.whole("kvferry: store sweep", html.THEME + _STYLE + interactive.STYLE, parts)


def _chart(chart: charts.Chart, name: str) -> str:
    return interactive.figure(chart, f"chart of {name}")


def _split(results: Sequence[Result]) -> list[str]:
    """The parts of a read; empty without them."""
    chart = charts.split(results)
    if chart is None:
        return []
    rows = [
        [f"{one.point.concurrency} ({one.point})", *(f"{ms:.3f}" for ms in one.split[:6]),
         f"{one.split.apart_percent:.1f} %"]
        for one in results if one.split is not None
    ]  # fmt: skip
    about = (
        "<p>Means, which sum up. <em>Serialize</em>: until the request was passed to ZeroMQ. "
        "<em>Server</em>: in the server without its storage. <em>Storage</em>: until its store "
        "had found and read the blocks. <em>Deserialize</em>: into the client's memory, verified, "
        "until its thread continued. <em>Network</em>: the rest of the way, with both sockets' "
        "queues. <em>Apart</em>: reads, measured as a whole, that are more than 5 % off the sum "
        "of their parts.</p>"
    )
    three = [
        [f"{one.point.concurrency} ({one.point})", *(f"{ms:.3f}" for ms in one.split.three),
         f"{one.split.read:.3f}"]
        for one in results if one.split is not None
    ]  # fmt: skip
    about += (
        "<p>In three: <em>client-server</em> is serialize, network and deserialize; "
        "<em>blob</em> is storage: the server's memory, or the object store where one is named "
        "above.</p>"
    )
    headers = ["at once", *PARTS, "read", "apart"]
    return ["<h2>Parts of a read</h2>", _chart(chart, "parts of a read"), about,
            _table(headers, rows),
            _table(["at once", *printed.THREE_HEADERS, "read"], three)]  # fmt: skip


def _about_slas() -> str:
    return (
        "<p>The point with the most tokens whose reads (p50) are below the limit. The limits are "
        "the source's; where those choose only one point, the first of them follows limits in the "
        "same proportion to the fastest read.</p>"
    )


def _slas(slas: Sequence[WithinSla]) -> str:
    return _table(printed.SLA_HEADERS, [printed.sla_cells(one) for one in slas], words=(0, 1))


def _about(record: Record, block_bytes: int) -> str:
    emulated = str(record.parameters.get("emulated storage", ""))
    bucket = str(record.parameters.get("bucket", ""))
    servers = str(record.parameters.get("servers", ""))
    stolen = f" The host gave {record.stolen_percent:g} % of the CPU time to other machines." if (
        record.stolen_percent) else ""  # fmt: skip
    storage = f"<p><strong>The storage is emulated:</strong> {escape(emulated)}.</p>" if (
        emulated) else ""  # fmt: skip
    storage += f"<p>Object store: {escape(bucket)}.</p>" if bucket else ""
    if objects := str(record.parameters.get("objects", "")):
        storage += f"<p>{escape(objects)}.</p>"
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    return (
        f"<p>A conversation of {conversation.NUM_TURNS} turns is {conversation.LOOKUPS} lookups, "
        f"{conversation.READS} streamed reads and {conversation.WRITES} writes of blocks of "
        f"{conversation.BLOCK_TOKENS} tokens, {format_bytes(block_bytes)} each, booked as "
        f"{conversation.TOKENS_BOOKED:,} tokens. It moves {conversation.BLOCKS_MOVED} blocks: a "
        "read is of all blocks written before. Percentiles are of the samples of all clients "
        f"together.</p>{storage}"
        f"<p>{escape(record.describe_machine())}, {escape(record.started)}.{stolen} "
        f"{escape(servers)}<br>"
        f"<code>{escape(record.command)}</code><br>{escape(versions)}</p>"
    )


def _about_source() -> str:
    return (
        f"<p>From {escape(source.LABEL)}; another machine, so compare shapes and not numbers. "
        "Three things in it are corrected here. Its 512 bytes a block are the token ids: it moved "
        f"{source.BLOCK_BYTES:,} bytes. It averaged percentiles over its processes, which hides "
        "the slowest. Its capacity table allows 8x2 for reads below 30 ms though its 8x4 reads in "
        "25.96 ms.</p>"
    )


def _points(results: Sequence[Result]) -> str:
    """A table with the source's columns."""
    rows = [
        [f"{r.point.concurrency} ({r.point})", f"{r.tps:.1f}", f"{r.tokens_per_s / 1e3:.1f}",
         *_ms(r.lookup[:3]), *_ms(r.read[:3])]
        for r in results
    ]  # fmt: skip
    names = [f"{operation} {p}" for operation in ("lookup", "read")
             for p in Percentiles._fields[:3]]  # fmt: skip
    return _table(["at once", "a second", "K tokens/s", *names], rows)


def _about_cores() -> str:
    return (
        "<p><em>Cores to spare</em>: at least half of them were idle, and one whole; clients run "
        "on the same ones. <em>Lookups</em>: p50, in times that of the fewest at once; up to 1.25 "
        "is flat. <em>Server</em>: what its process used, of one core.</p>"
    )


def _rest(verdicts: Sequence[spare.Verdict]) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f} %"

    rows = [
        [f"{r.point.concurrency} ({r.point})", percent(r.cpu_percent), percent(r.server_percent),
         *verdict.words, str(r.errors), *_ms([r.lookup.p100, r.read.p100]), *_ms(r.write)]
        for verdict in verdicts for r in [verdict.result]
    ]  # fmt: skip
    writes = ["write p50", *Percentiles._fields[1:]]
    return _table(["at once", "CPU", "server", "cores to spare", "lookups", "errors",
                   "lookup p100", "read p100", *writes], rows)  # fmt: skip


def _ms(values: Sequence[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.2f}" for value in values]


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
    return _wide(f"<table>{line(headers, 'th')}\n{body}</table>")


def _wide(what: str) -> str:
    """A frame that scrolls on a narrow screen."""
    return f'<div class="wide">{what}</div>'
