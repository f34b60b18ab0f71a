"""ZeroMQ: what does it cost to receive blocks through it, and how far is that from bare sockets?

Another process (for inproc, another thread) holds the blocks and answers one request per batch of
64. Three ways to receive, and raw TCP and unix sockets: the bounds of everything that goes through
the kernel's loopback. Ratios are to a plain copy of the same blocks.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq

from benchmarks.harness import machine, options, table
from benchmarks.harness.plot import Chart
from benchmarks.harness.record import Record
from benchmarks.harness.runner import Case, Runner, Skipped
from benchmarks.remote_kv_cache.baseline.sockets import sender
from benchmarks.remote_kv_cache.baseline.sockets.receivers import RawReceiver, ZmqReceiver
from benchmarks.remote_kv_cache.work import blocks, results, source_figures
from benchmarks.remote_kv_cache.work.blocks import Pool, Work
from benchmarks.remote_kv_cache.work.results import Variant
from remote_server.allocator import keep_freed_memory

MODULE = "benchmarks.remote_kv_cache.baseline.test_zmq_transfer"

NAIVE = Variant("b2b naive")
TRANSPORTS = ("tcp", "ipc", "inproc")
RAW_TCP_ONE = Variant("raw socket, one connection", "tcp")
RAW_TCP_TWO = Variant("raw sockets, two connections", "tcp")
RAW_UNIX = Variant("raw socket, one connection", "ipc")
WALLS = {"tcp": RAW_TCP_TWO, "ipc": RAW_UNIX}
CHARTED = [
    *(Variant(operation, "tcp") for operation in ("copying", "zero-copy", "recv_into")),
    RAW_TCP_TWO, Variant("recv_into", "ipc"), RAW_UNIX, Variant("recv_into", "inproc"),
]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = options.parser(MODULE, "what receiving blocks through ZeroMQ costs")
    blocks.add_options(parser)
    parser.add_argument(
        "--tuned", action="store_true", help="keep freed memory on both sides, as kvferry does: "
        "libzmq allocates every message, and its page faults can cost more than the copy",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.tuned:
        keep_freed_memory()
    record = Record.begin(MODULE, argv)
    record.parameters |= {"memcpy": str(NAIVE), "tuned": arguments.tuned}

    def measure_model(runner: Runner, work: Work) -> None:
        measure(runner, record, work, arguments.memory, arguments.tuned)

    runner = results.over_models(arguments, measure_model)
    options.write(record, runner, arguments, chart)
    show(record, results.describe_work(arguments))
    return options.finish(record, runner)


def chart(record: Record) -> Chart:
    """The transports that a reader compares first."""
    return results.chart(CHARTED, record)


def measure(runner: Runner, record: Record, work: Work, memory: int | None, tuned: bool) -> None:
    """Measure all transports for one model, interleaved, into `record`."""
    batch_bytes = work.num_bytes // len(work.batches)
    try:
        # Two pools here and one in the sender, and a batch as sent, as queued and as received.
        machine.skip_unless_fits(3 * work.num_bytes + 3 * batch_bytes, memory)
    except Skipped as reason:
        record.rows += results.skipped_rows(work, NAIVE.operation, str(reason))
        return
    runner.show(f"{work.model.name}: filling {work.num_bytes >> 20} MiB on both sides")
    source = blocks.allocate(work.num_blocks, work.block_bytes)
    target = blocks.allocate(work.num_blocks, work.block_bytes)
    blocks.fill(source)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-")))
        there = stack.enter_context(sender.Sender(work.num_blocks, work.block_bytes, folder, tuned))
        cases = _cases(stack, there, source, target, work)
        samples = runner.measure(work.model.name, cases, work.num_bytes)
        # Before the sender is stopped, because the stop may be interrupted.
        record.rows += results.rows_of(work, samples, NAIVE, WALLS)


def _cases(
    stack: ExitStack, there: sender.Sender, source: Pool, target: Pool, work: Work
) -> list[Case]:
    """Connections live as long as `stack`: connecting is not measured."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stack.callback(context.term)
    endpoints = {
        "tcp": there.zmq_tcp,
        "ipc": there.zmq_ipc,
        "inproc": sender.serve_zmq(context, "inproc://sender", source),
    }
    poison = partial(blocks.poison, target)
    verify = partial(blocks.verify, source, target, work.everything)
    cases = [Case(NAIVE, partial(blocks.copy_naive, source, target, work), poison, verify)]
    for transport, endpoint in endpoints.items():
        receiver = ZmqReceiver(context, endpoint, target, work)
        stack.callback(receiver.close)
        for operation, run in (
            ("copying", receiver.copying),
            ("zero-copy", receiver.zero_copy),
            ("recv_into", receiver.receive_into),
        ):
            cases.append(Case(Variant(operation, transport), run, poison, verify))
    addresses: list[tuple[Variant, tuple[str, int] | str, int]] = [
        (RAW_TCP_ONE, ("127.0.0.1", there.tcp_port), 1),
        (RAW_TCP_TWO, ("127.0.0.1", there.tcp_port), 2),
        (RAW_UNIX, there.unix, 1),
    ]
    for variant, address, num_connections in addresses:
        raw = stack.enter_context(RawReceiver(address, num_connections, target, work))
        cases.append(Case(variant, raw.receive, poison, verify))
    return cases


def show(record: Record, heading: str) -> None:
    """Print the source's table with its figures under ours, then all details."""
    lines: list[list[table.Cell]] = []
    for model in dict.fromkeys(row.model for row in record.rows):
        rows = [row for row in record.rows if row.model == model]
        for operation in ("copying", "zero-copy", "recv_into"):
            columns = [Variant(operation, transport) for transport in TRANSPORTS]
            seconds = [results.median_of(rows, column) for column in columns]
            deltas = [results.ratio_of(rows, column) for column in columns]
            naive = results.median_of(rows, NAIVE)
            lines.append([model, operation, naive, *seconds, *deltas])
        if (figures := source_figures.ZMQ_TRANSFER.get(model)) is not None:
            lines.append([source_figures.LABEL, "", *figures])
    names = ["model", "receive", NAIVE.operation, *TRANSPORTS]
    print(heading)
    print(table.render([*names, *(f"delta-{transport}" for transport in TRANSPORTS)], lines))
    print(f"\n{results.details(record.rows)}")


if __name__ == "__main__":
    sys.exit(main())
