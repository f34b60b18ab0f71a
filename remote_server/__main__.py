"""`python -m remote_server --memory 8GiB`: run one cache server in the foreground."""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial

from remote_server.admin.admin import Admin
from remote_server.allocator import keep_freed_memory
from remote_server.errors import ConfigError, ServerFailed
from remote_server.garbage import only_new_collected
from remote_server.native.mover import what_moves
from remote_server.plain_text import PlainFormatter, plain
from remote_server.process_limits import named_when_missing, raise_limit
from remote_server.server import settings
from remote_server.server.server import Server
from remote_server.values import format_bytes


def main(arguments: Sequence[str] | None = None, prog: str = "python -m remote_server") -> int:
    """Returns the exit status: 0 after a signal, 2 when a setting is wrong or impossible here."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Keep KV-cache blocks for vLLM engines on this or other hosts.",
        epilog="Every setting may also be a variable, KVFERRY_MEMORY=8GiB, or be in the file. "
        "SIGTERM or Ctrl-C drains and exits; a second one exits at once. With --all a server that "
        "ends is named with its status and is not started again; the others go on, and the exit "
        "status is 1 in the end.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="start every [servers.NAME] of the file of --settings on this host, a process each; "
        "other flags are for each of them",
    )
    settings.add_flags(parser)
    given = sys.argv[1:] if arguments is None else arguments
    flags = settings.parse(parser, given)
    try:
        if flags.all:
            from remote_server.cli import serve_all

            return serve_all.run(flags, given, os.environ)
        chosen = settings.choose(flags, os.environ)
        config = chosen.config
        if flags.print_config:
            print(chosen.as_toml())
            return 0
        handler = logging.StreamHandler()
        handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
        logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
        keep_freed_memory()
        raise_limit()
        with named_when_missing():
            admin = Admin(config)
        with admin, only_new_collected():
            Server(config).run(on_ready=partial(_begin, admin))
    except ConfigError as error:
        print(plain(f"remote_server: {error}"), file=sys.stderr)
        return 2
    except ServerFailed as error:
        print(plain(f"remote_server: {error}"), file=sys.stderr)
        return 1
    return 0


def _begin(admin: Admin, server: Server) -> None:
    # The first full pass goes over all that the start has made: 18 ms, and 0.4 s with a million
    # recovered blocks. It is made now, so that no request waits for it.
    gc.collect()
    tiers = server.tiers()
    memory = tiers["memory"]
    disk = f"disk {format_bytes(tiers['disk'].budget_bytes)}  " if "disk" in tiers else ""
    bucket = f"bucket {plain(server.config.bucket)}  " if "bucket" in tiers else ""
    print(
        f"remote_server ready on {server.endpoint}  "
        f"memory {format_bytes(memory.budget_bytes)} in {memory.free_slabs} slabs  {disk}{bucket}"
        f"mover {plain(what_moves())}  lanes {plain(str(server.lanes))}  "
        f"epoch {server.store.epoch}" + (f"  admin {admin.url}" if admin.url else ""),
        flush=True,
    )
    admin.serve(server)


if __name__ == "__main__":
    sys.exit(main())
