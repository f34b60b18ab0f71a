"""`kvferry top`: one screen of a server, or of a list of servers, that renews itself."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from remote_server.cli.connection import ask_stats, connected
from remote_server.cli.exit_status import NO, YES, NoServer
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.figures.top_lines import screen
from remote_server.cli.flags import seconds
from remote_server.cli.output import coloured, height, is_terminal, print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.servers import add_servers, connected_to_each, servers_of, some
from remote_server.errors import DeadlineExceeded, RequestRefused, ServerUnavailable
from remote_server.fleet.server_list import ServerList
from remote_server.protocol import StatsReply

LINES_BESIDE_ENGINES = 24


def add_flags(parser: Parser) -> None:
    add_servers(parser)
    parser.add_argument("--every-s", type=seconds, default=1.0, metavar="SECONDS",
                        help="how often it is renewed (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--once",
        action="store_true",
        help="one screen, and end; so also where there is no terminal",
    )


def run(flags: argparse.Namespace) -> int:
    """A server that does not answer is named on the screen, and is asked again; the first time it
    ends the command."""
    servers = servers_of(flags)
    once = flags.once or not is_terminal()
    with _looks(servers, flags) as look, _screen() as show:
        before: StatsReply | None = None
        gone_s: float | None = None
        num_looks = 0
        while True:
            try:
                reply, note = look()
            except (ServerUnavailable, DeadlineExceeded, RequestRefused) as error:
                if once:
                    raise NoServer(f"no answer any more from {flags.server}: {error}") from error
                if gone_s is None:
                    gone_s = time.monotonic()
                show([f"{flags.server}: no answer for {time.monotonic() - gone_s:.0f} s", "",
                      str(error)])  # fmt: skip
            else:
                gone_s = None
                num_looks += 1
                if before is not None or not once:
                    most = max(height() - LINES_BESIDE_ENGINES, 5)
                    lines = screen(reply, before, most)
                    show([lines[0], *([note] if note else []), *lines[1:]])
                before = reply
            if once and num_looks == 2:
                return NO if note else YES
            time.sleep(flags.every_s)


Look = Callable[[], tuple[StatsReply, str]]


@contextmanager
def _looks(servers: ServerList, flags: argparse.Namespace) -> Iterator[Look]:
    """A function that returns the statistics of all servers as those of one, and a note about those
    that did not answer."""
    if len(servers.members) == 1:
        with connected(flags) as client:
            yield lambda: (ask_stats(client, flags.timeout_s), "")
        return
    with connected_to_each(servers, flags) as (each, _):

        def look() -> tuple[StatsReply, str]:
            replies = each.stats(flags.timeout_s)
            if not replies.received:
                raise ServerUnavailable(f"none of {some(replies.failed)}")
            which = f"{len(replies.received):,} of {len(servers.members):,} servers"
            total = replace(sum_of(replies.received), name=which)
            missing = f"no answer from {some(replies.failed)}" if replies.failed else ""
            return total, missing

        yield look


@contextmanager
def _screen() -> Iterator[Callable[[list[str]], None]]:
    """Shows lines in place of those before, on a terminal; it is as before afterwards, also after
    Ctrl-C. Elsewhere it prints them."""
    if not is_terminal():
        yield lambda lines: print_lines(*lines, "")
        return
    sys.stdout.write("\033[?1049h\033[?25l")  # the other screen, without a cursor

    def show(lines: list[str]) -> None:
        sys.stdout.write("\033[H\033[J")
        print_lines(*lines[: height() - 1])
        sys.stdout.write(coloured("Ctrl-C ends it", "dim"))
        sys.stdout.flush()

    try:
        yield show
    finally:
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()


COMMAND = Command(
    add_flags,
    run,
    description="Show hit rates by level, throughput, occupancy, evictions, and each engine's "
    "tokens by the level that had them, as they change. The numbers are those of `kvferry stats`.",
    examples="""\
kvferry top
kvferry top --server 'kvferry-{0..2}.kvferry:5757'     # a fleet, as one
kvferry top --once                                     # for a script or a report
""",
)
