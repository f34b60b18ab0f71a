"""`kvferry watch`: changes on a server, a line for each second that had any."""

import argparse
import time
from collections.abc import Mapping
from typing import Any

from remote_server.ascii_json import ascii_json
from remote_server.cli.common import NoServer, add_server, ask_stats, connected, say, seconds
from remote_server.protocol import StatsReply
from remote_server.sizes import format_bytes


def add(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "watch", help="changes on the server, line by line, until Ctrl-C"
    )
    add_server(parser)
    parser.add_argument("--every-s", type=seconds, default=1.0, metavar="SECONDS",
                        help="how long one line covers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object a line, for scripts")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Goes on over restarts of the server, which are events too."""
    before: StatsReply | None = None
    with connected(flags) as client:
        while True:
            try:
                now = ask_stats(client, flags.timeout_s)
            except Exception as error:
                if before is not None:
                    _say(flags, ["the server is gone"], {})
                    before = None
                if client.closed:
                    raise NoServer("the connection is closed") from error
            else:
                told, grown = events(before, now)
                if told:
                    _say(flags, told, grown)
                before = now
            time.sleep(flags.every_s)


def _say(flags: argparse.Namespace, told: list[str], grown: Mapping[str, int]) -> None:
    at = time.strftime("%H:%M:%S")
    if flags.json:
        say(ascii_json({"at": time.time(), "events": told, "counters": dict(grown)}))
    else:
        say(f"{at}  {'; '.join(told)}")


def events(before: StatsReply | None, now: StatsReply) -> tuple[list[str], dict[str, int]]:
    """The events between two replies, and the counters that grew."""
    if before is None:
        blocks = sum(tier.blocks for tier in now.tiers.values())
        return [f"{now.server}, epoch {now.epoch}: {blocks:,} blocks"], {}
    if before.epoch != now.epoch:
        return [f"the server was restarted, epoch {now.epoch}"], {}
    told = [f"+ namespace {name}" for name in now.namespaces if name not in before.namespaces]
    told += [f"- namespace {name}" for name in before.namespaces if name not in now.namespaces]
    grown = {
        name: count - before.counters.get(name, 0)
        for name, count in now.counters.items()
        if count != before.counters.get(name, 0)
    }
    told += [
        f"{name} {format_bytes(by) if 'bytes' in name else format(by, ',')}"
        for name, by in grown.items()
    ]
    return told, grown
