"""`kvferry record`: a trace of a server's requests, in a file that shows no prompt."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.exit_status import NO, YES
from remote_server.cli.flags import add_timeout, seconds
from remote_server.cli.output import print_error, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.progress import Progress
from remote_server.cli.servers import one_server
from remote_server.cli.traces.record_file import NotWritten, TraceFile
from remote_server.cli.traces.record_lines import Lines, foot, head
from remote_server.client import RemoteClient
from remote_server.errors import (
    ConfigError,
    DeadlineExceeded,
    KVFerryError,
    RemoteProtocolError,
    RequestRefused,
    ServerUnavailable,
)
from remote_server.protocol import ErrorCode, Recorded
from remote_server.values import EXAMPLE, KiB, format_bytes, parse_bytes

POLL_S = 0.5
LEAST_BYTES = 64 * KiB

MOST_AT_END = 32
"""Replies that are awaited when the recording is over: all that a server remembers."""


class _Gone(Exception):
    """The server has ended the recording. The message is the reason."""


class _Full(Exception):
    """The file is as large as it may be."""


class _Place(NamedTuple):
    """How far the requests of a server have been received."""

    epoch: str
    recording: int
    last: int


def add_flags(parser: Parser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="the trace, a new file; .gz in its name compresses it"
    )
    parser.add_argument(
        "--server",
        default=os.environ.get("KVFERRY_SERVER", EXAMPLE),
        type=one_server,
        metavar="ADDRESS",
        help="the cache server, as in `kvferry stats` (KVFERRY_SERVER; default: %(default)s)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="be the server of an engine that has no other: store nothing, and record what it "
        "would look up",
    )
    parser.add_argument(
        "--max-bytes", type=_size, default="256MiB", metavar="SIZE",
        help="the file ends before it is larger (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--for", type=seconds, dest="for_s", metavar="SECONDS",
        help="how long to record (default: until Ctrl-C)",
    )  # fmt: skip
    add_timeout(parser)


def _size(text: str) -> int:
    try:
        size = parse_bytes(text, "")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from None
    if size < LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is less than {format_bytes(LEAST_BYTES)}")
    return size


def run(flags: argparse.Namespace) -> int:
    """0 when it was ended by the user, the time or the size, 1 by the server or the disk."""
    path = Path(flags.file)
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists, and is not overwritten")
    with ExitStack() as stack:
        if flags.listen is not None:
            from remote_server.cli.traces.record_listen import NoStore

            server = stack.enter_context(NoStore(flags.listen))
            flags.server = server.endpoint
            print_lines(f"listening on {server.endpoint}: point an engine to it")
        client = stack.enter_context(connected(flags))
        stop = stack.enter_context(_stopped_by_signals())
        place = _begin(client, flags.timeout_s)
        stats = ask_stats(client, flags.timeout_s)
        tiers = {name: one.budget_bytes for name, one in stats.tiers.items()}
        with TraceFile(path, flags.max_bytes) as file:
            file.write(head(stats.server, {} if flags.listen else tiers))
            print_lines(f"recording {flags.server} into {path}; Ctrl-C ends it")
            return _record(client, place, file, flags, stop)


def _begin(client: RemoteClient, timeout_s: float) -> _Place:
    """Switches the recording on."""
    try:
        reply = client.record(timeout_s=timeout_s).result(timeout_s + 1)
    except RequestRefused as error:
        if error.code == ErrorCode.BAD_MESSAGE:
            raise ConfigError(
                "this server is older than the command: it cannot record; upgrade it first"
            ) from error
        raise
    return _Place(reply.epoch, reply.recording, reply.last)


def _record(
    client: RemoteClient, place: _Place, file: TraceFile, flags: argparse.Namespace,
    stop: threading.Event,
) -> int:  # fmt: skip
    """The exit status; the file is whole then, whatever ended it."""
    lines, lost, status, num_last = Lines(), 0, YES, 0
    ends_at = time.monotonic() + flags.for_s if flags.for_s else float("inf")
    try:
        try:
            with Progress() as progress:
                while True:
                    num_last += stop.is_set() or time.monotonic() >= ends_at
                    reply = _next(client, place, flags.timeout_s)
                    more = reply.more and reply.last > place.last  # or it would be asked at once
                    place, lost = place._replace(last=reply.last), lost + reply.lost
                    lines.take(reply.requests)
                    _write(file, lines.due(reply.now_s))
                    progress.show(_summary(lines, file, lost))
                    if num_last and (not more or num_last > MOST_AT_END):
                        break
                    if not more:
                        stop.wait(max(0.0, min(POLL_S, ends_at - time.monotonic())))
        except (_Gone, RemoteProtocolError) as error:
            print_error(str(error))
            status = NO
        _write(file, lines.rest())
    except _Full:
        print_lines("the file is as large as --max-bytes allows")
    except NotWritten as error:
        print_error(str(error))
        status = NO
    return _finish(file, lines, lost, status, Path(flags.file))


def _next(client: RemoteClient, place: _Place, timeout_s: float) -> Recorded:
    """The requests behind `place`. Raises `_Gone` when there will be none."""
    while True:
        try:
            reply = client.record(after=place.last, timeout_s=timeout_s).result(timeout_s + 1)
        except DeadlineExceeded:
            continue  # after a few of them the client finds the server unavailable
        except ServerUnavailable as error:
            raise _Gone(f"the server is gone: {error}") from error
        except KVFerryError as error:
            raise _Gone(f"the server refuses to go on: {error}") from error
        if reply.epoch != place.epoch:
            raise _Gone("the server was started anew: record again")
        if reply.recording != place.recording:
            raise _Gone("no query of this command reached the server for long: record again")
        return reply


def _write(file: TraceFile, lines: Iterator[bytes]) -> None:
    for line in lines:
        if not file.write(line):
            raise _Full


def _finish(file: TraceFile, lines: Lines, lost: int, status: int, path: Path) -> int:
    try:
        file.end(foot(lines, lost))
    except NotWritten as error:
        print_error(f"{path} has no last line: {error}")
        return NO
    print_lines(f"{path}: {_summary(lines, file, lost)}")
    if lines.num_without_place:
        print_lines(
            f"{lines.num_without_place:,} requests are not in it: blocks without size or place"
        )
    return status


def _summary(lines: Lines, file: TraceFile, lost: int) -> str:
    found = f"{lines.found_tokens / lines.tokens:.1%}" if lines.tokens else "nothing"
    return (
        f"{lines.num_lookups:,} lookups of {lines.tokens:,} tokens, {found} found, "
        f"{lines.num_lines - lines.num_lookups:,} puts, {format_bytes(file.num_bytes)}"
        + (f", {lost:,} lost" if lost else "")
    )


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Set by the first SIGINT or SIGTERM; the second one acts as it does elsewhere."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def on_signal(_: int, __: FrameType | None) -> None:
        restore()
        stop.set()

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


COMMAND = Command(
    add_flags,
    run,
    description="Write a trace of the requests of a running server: enough to replay them, and "
    "nothing that shows a prompt. Keys of blocks are hashed with a random salt that is thrown "
    "away, times begin with the first request, and namespaces are numbers.",
    notes="The server remembers requests only while this command asks for them. One of a tenant "
    "shows the requests of that tenant. docs/recording.md has the format.",
    examples="""\
kvferry record trace.jsonl.gz                       # until Ctrl-C
kvferry record trace.jsonl.gz --for 3600 --server 10.0.0.7:5757
kvferry record trace.jsonl --listen 127.0.0.1:5757  # of an engine without a server
""",
)
