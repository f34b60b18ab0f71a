"""`python -m remote_server --memory 8GiB`: run one cache server in the foreground."""

import argparse
import difflib
import logging
import sys
from collections.abc import Sequence
from functools import partial

from remote_server.admin.admin import Admin
from remote_server.config import GiB, MiB, ServerConfig, format_bytes, parse_bytes
from remote_server.errors import ConfigError
from remote_server.malloc import keep_freed_memory
from remote_server.server import Server


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after a signal, 1 when the server cannot start here."""
    parser = _parser()
    flags = _parse(parser, sys.argv[1:] if arguments is None else arguments)
    try:
        config = ServerConfig(
            bind=flags.bind,
            memory=parse_bytes(flags.memory, "memory"),
            disk=flags.disk,
            disk_bytes=parse_bytes(flags.disk_bytes, "disk_bytes"),
            disk_write_rate=parse_bytes(flags.disk_write_rate, "disk_write_rate"),
            disk_admit=flags.disk_admit,
            drain_timeout_s=flags.drain_timeout_s,
            populate=flags.populate,
            shared_memory=flags.shared_memory,
            insecure=flags.insecure,
            admin=flags.admin,
            admin_token_file=flags.admin_token_file,
            log_level=flags.log_level,
        )
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
        )
        keep_freed_memory()
        with Admin(config) as admin:
            Server(config).run(on_ready=partial(_say_ready, admin))
    except ConfigError as error:
        print(f"remote_server: {error}", file=sys.stderr)
        return 1
    return 0


def _say_ready(admin: Admin, server: Server) -> None:
    tiers = server.store.tier_stats()
    memory = tiers["memory"]
    disk = f"disk {format_bytes(tiers['disk'].budget_bytes)}  " if "disk" in tiers else ""
    print(
        f"remote_server ready on {server.endpoint}  "
        f"memory {format_bytes(memory.budget_bytes)} in {memory.free_slabs} slabs  {disk}"
        f"epoch {server.store.epoch}" + (f"  admin {admin.url}" if admin.url else ""),
        flush=True,
    )
    admin.serve(server)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m remote_server",
        description="Keep KV-cache blocks in memory for vLLM engines on this or other hosts.",
        epilog="SIGTERM or Ctrl-C drains and leaves; a second one leaves at once.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults = ServerConfig()
    add = parser.add_argument
    add("--bind", default=defaults.bind, metavar="ADDRESS", help="port * picks a free one")
    add("--memory", default=f"{defaults.memory // GiB}GiB", metavar="SIZE",
        help="budget for all blocks, as 512MiB or 8GiB")  # fmt: skip
    add("--disk", default=defaults.disk, metavar="DIR",
        help="keep blocks beyond memory there, also over a restart (default: nowhere)")  # fmt: skip
    add("--disk-bytes", default=f"{defaults.disk_bytes // GiB}GiB", metavar="SIZE",
        help="budget for all files in it")  # fmt: skip
    add("--disk-write-rate", default=f"{defaults.disk_write_rate // MiB}MiB", metavar="SIZE",
        help="written there per second, on average; 0 is without limit")  # fmt: skip
    add("--disk-admit", default=defaults.disk_admit, metavar="WHICH",
        help="all new blocks, or those put or got twice")  # fmt: skip
    add("--drain-timeout-s", type=float, default=defaults.drain_timeout_s, metavar="SECONDS",
        help="how long the first signal lets streams and writes finish")  # fmt: skip
    add("--populate", action=argparse.BooleanOptionalAction, default=defaults.populate,
        help="fault the memory in from the background")  # fmt: skip
    add("--shared-memory", action=argparse.BooleanOptionalAction, default=defaults.shared_memory,
        help="move the blocks of clients on this host through shared memory")  # fmt: skip
    add("--insecure", action="store_true",
        help="allow an address that other machines can reach")  # fmt: skip
    add("--admin", default=defaults.admin, metavar="ADDRESS",
        help="HTTP for metrics, state and a page; or off")  # fmt: skip
    add("--admin-token-file", default=defaults.admin_token_file, metavar="FILE",
        help="the token that clearing and draining over HTTP takes (default: refused)")  # fmt: skip
    add("--log-level", default=defaults.log_level, metavar="LEVEL",
        help="debug, info, warning or error")  # fmt: skip
    return parser


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Like `parse_args`, but an unknown flag is met with the nearest known one."""
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].split("=")[0]
        known = [text for action in parser._actions for text in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        parser.error(f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return flags


if __name__ == "__main__":
    sys.exit(main())
