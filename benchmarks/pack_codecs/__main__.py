"""Codecs: how much shorter do packs of KV cache become, how fast, and below which link does it pay?

    python -m benchmarks.peers --only codecs,smollm2     a trained model, and the codecs not chosen
    python -m benchmarks.pack_codecs
    python -m benchmarks.pack_codecs --models small --kv-dtypes bf16

Rows come from the packs that a server wrote below a real engine. Every codec is on one thread and
gets each row by itself, as in a pack. Times are of that thread's CPU: what else runs on the machine
takes no part in them.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.engine.driver import EngineFailed
from benchmarks.harness import options, plot, table, titles
from benchmarks.harness.commands import peer_folder
from benchmarks.harness.record import Figure, Record, Row
from benchmarks.harness.runner import Case, Runner, Sample, Skipped, WrongBytes
from benchmarks.pack_codecs import trained_model, ways
from benchmarks.pack_codecs.rows import Rows, make_rows, random_prompts, text_prompts
from benchmarks.pack_codecs.ways import Way
from examples import tiny_model
from examples.processes import StartFailed
from remote_server.values import MiB

MODULE = "benchmarks.pack_codecs"

TRAINED, RANDOM = trained_model.NAME, "wide"
KV_DTYPES = ("bf16", "fp8")
COPY = "copy"
LINK_GB_PER_S = 1.25
"""10 Gb/s."""


class Key(NamedTuple):
    way: str
    direction: str

    def __str__(self) -> str:
        return f"{self.direction}, {self.way}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    record = Record.begin(MODULE, argv)
    record.versions |= peer_folder.versions(ways.PEER, trained_model.PEER)
    with Runner(arguments.trials, arguments.warm_ups, clock=time.thread_time) as runner:
        for model in arguments.models:
            for kv_dtype in arguments.kv_dtypes:
                _measure_one(record, runner, model, kv_dtype, arguments)
    options.write(record, runner, arguments, chart)
    print(_describe(record))
    return options.finish(record, runner)


def _parser() -> argparse.ArgumentParser:
    made = options.parser(MODULE, "ratio and speed of codecs on the KV cache of an engine")
    made.add_argument(
        "--models", type=options.names((TRAINED, *tiny_model.PRESETS)), default=[TRAINED, RANDOM],
        metavar="NAMES", help=f"{TRAINED}, whose weights are trained and whose prompts are this "
        f"repository's documents; {', '.join(tiny_model.PRESETS)}, whose weights are random "
        f"(default: {TRAINED},{RANDOM})",
    )  # fmt: skip
    made.add_argument(
        "--kv-dtypes", type=options.names(KV_DTYPES), default=[*KV_DTYPES], metavar="NAMES",
        help=f"formats of the KV cache (default: {','.join(KV_DTYPES)})",
    )  # fmt: skip
    made.add_argument(
        "--input-len", type=options.positive, default=2049, help="tokens of a prompt (%(default)s)"
    )
    made.add_argument("--num-prompts", type=options.positive, default=3, help="(%(default)s)")
    made.add_argument(
        "--folder", type=Path, default=Path(".cache/models"), metavar="DIR",
        help="the folder for models that are made on the spot (default: %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--bytes", type=options.size, default=32 * MiB, metavar="SIZE",
        help="the most of the rows that are compressed (default: 32MiB)",
    )  # fmt: skip
    return made


def _measure_one(
    record: Record, runner: Runner, model: str, kv_dtype: str, arguments: argparse.Namespace
) -> None:
    if runner.interrupted:
        return
    try:
        runner.show(f"{model} {kv_dtype}: an engine computes the rows")
        found = _rows(model, kv_dtype, arguments)
    except (Skipped, StartFailed) as reason:
        record.rows.append(Row(f"{model} {kv_dtype}", COPY, 0, Sample(skipped=str(reason))))
        return
    except EngineFailed as reason:
        runner.num_failed += 1
        record.rows.append(Row(f"{model} {kv_dtype}", COPY, 0, Sample(failed=str(reason))))
        return
    fitting = max(1, arguments.bytes // len(found.rows[0]))
    found = found._replace(rows=found.rows[:fitting])
    record.parameters[found.label] = {"rows": len(found.rows), "row_bytes": len(found.rows[0])}
    measure(record, runner, found)


def _rows(model: str, kv_dtype: str, arguments: argparse.Namespace) -> Rows:
    tokens, count = arguments.input_len, arguments.num_prompts
    if model == TRAINED:
        path = trained_model.build(arguments.folder)
        return make_rows(path, kv_dtype, text_prompts(path, tokens, count))
    path = tiny_model.build(arguments.folder / model, model)
    return make_rows(path, kv_dtype, random_prompts(tokens, count))


def measure(record: Record, runner: Runner, found: Rows) -> None:
    """All ways for the rows of one model, interleaved, into `record`."""
    num_bytes = sum(map(len, found.rows))
    stored: dict[str, int] = {}
    cases = _copies(found)
    for name, make in ways.all_of(found.element_bytes).items():
        cases += _cases(name, make, found, stored)
    samples = runner.measure(found.label, cases)
    copy = samples[Key(COPY, "compress")]
    for key, sample in samples.items():
        assert isinstance(key, Key)
        row = Row(found.label, key.direction, num_bytes, sample, transport=key.way)
        if row.seconds and copy.measured:
            row.ratio_to_memcpy = row.seconds / min(copy.values)
        record.rows.append(row)
    for name, length in stored.items():
        speeds = {
            direction: Row("", direction, num_bytes, samples[Key(name, direction)]).gb_per_s
            for direction in ("compress", "decompress")
        }
        record.figures.append(_figure(found, name, num_bytes / length, speeds))


def _figure(found: Rows, name: str, ratio: float, speeds: dict[str, float | None]) -> Figure:
    """The ratio, and what follows for a link: a row takes 1/link without a codec, and with it
    1/(ratio·link) and the codec's time. Both are equal where the link is as fast as the codec
    times the part that it saves."""
    saved = 1 - 1 / ratio
    values = {"ratio": ratio}
    for direction, speed in speeds.items():
        if speed:
            values[f"{direction} GB/s"] = speed
            values[f"{direction} break-even GB/s"] = speed * saved
    return Figure(f"{found.label}: {name}", "", values)


def _copies(found: Rows) -> list[Case]:
    targets = [np.empty(len(row), np.uint8) for row in found.rows]
    sources = [np.frombuffer(row, np.uint8) for row in found.rows]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)

    return [Case(Key(COPY, "compress"), copy)]


def _cases(name: str, make: Callable[[], Way], found: Rows, stored: dict[str, int]) -> list[Case]:
    """Both directions of one way; `stored` gets the bytes that the rows take."""
    keys = Key(name, "compress"), Key(name, "decompress")
    try:
        way = make()
    except Skipped as reason:
        return [Case.skipped(key, reason) for key in keys]
    kept = [way.compress(row) for row in found.rows]
    stored[name] = sum(
        min(len(short), len(row)) for short, row in zip(kept, found.rows, strict=True)
    )
    results = [bytearray(len(row)) for row in found.rows]

    def compress() -> None:
        for row in found.rows:
            way.compress(row)

    def poison() -> None:
        for result in results:
            result[:16] = result[-16:] = b"\xa5" * 16

    def decompress() -> None:
        for short, result in zip(kept, results, strict=True):
            way.decompress(short, result)

    def verify() -> None:
        if any(result != row for result, row in zip(results, found.rows, strict=True)):
            raise WrongBytes("a row came back with other bytes")

    return [Case(keys[0], compress), Case(keys[1], decompress, poison, verify)]


def _describe(record: Record) -> str:
    headers = [
        "rows of", "codec", "ratio", "compress GB/s", "decompress GB/s", "writes pay below GB/s",
        "reads pay below GB/s",
    ]  # fmt: skip
    lines: list[list[table.Cell]] = []
    for figure in record.figures:
        label, _, name = figure.name.partition(": ")
        get = figure.values.get
        lines.append(
            [label, name, get("ratio"), get("compress GB/s"), get("decompress GB/s"),
             get("compress break-even GB/s"), get("decompress break-even GB/s")]
        )  # fmt: skip
    reasons = [f"{row.model}: {row.transport}: {row.reason}" for row in record.rows if row.reason]
    ends = [
        "Each codec on one thread, by its CPU time. On a link of the last two columns a transfer",
        f"takes as long with it as without; a link of 10 Gb/s has {LINK_GB_PER_S} GB/s.",
    ]
    return "\n".join([table.render(headers, lines), "", *ends, *dict.fromkeys(reasons)])


def chart(record: Record) -> plot.Chart:
    """Decompressed GB/s on one core, by codec and rows."""
    by_way: dict[str, dict[str, float]] = {}
    for figure in record.figures:
        label, _, name = figure.name.partition(": ")
        by_way.setdefault(name, {})[label] = figure.values.get("decompress GB/s", 0.0)
    labels = [*dict.fromkeys(figure.name.partition(": ")[0] for figure in record.figures)]
    series = {name: [each.get(label) for label in labels] for name, each in by_way.items()}
    title = titles.of(record, "decompression of rows on one thread")
    return plot.bars(title, "GB/s", labels, series)


if __name__ == "__main__":
    sys.exit(main())
