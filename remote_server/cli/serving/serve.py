"""`kvferry serve` and `python -m remote_server`: run one cache server, or all of a file."""

import argparse
import gc
import logging
import os
from functools import partial

from remote_server.admin.admin import Admin
from remote_server.allocator import keep_freed_memory
from remote_server.cli.exit_status import YES
from remote_server.cli.output import print_lines
from remote_server.cli.parser import Command, Parser
from remote_server.cli.serving import serve_all
from remote_server.garbage import only_new_collected
from remote_server.native.mover import what_moves
from remote_server.plain_text import PlainFormatter
from remote_server.process_limits import named_when_missing, raise_limit
from remote_server.server import settings
from remote_server.server.server import Server
from remote_server.values import format_bytes


def add_flags(parser: Parser) -> None:
    process = parser.add_argument_group("settings and process")
    settings.add_sources(process)
    process.add_argument(
        "--all", action="store_true",
        help="start every [servers.NAME] of the file of --settings on this host, a process each; "
        "other flags are for each of them",
    )  # fmt: skip
    settings.add_flags(parser)


def run(flags: argparse.Namespace) -> int:
    """0 after a signal."""
    if flags.all:
        return serve_all.run(flags, os.environ)
    chosen = settings.choose(flags, os.environ)
    config = chosen.config
    if flags.print_config:
        print_lines(*chosen.as_toml().split("\n"))
        return YES
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    keep_freed_memory()
    raise_limit()
    with named_when_missing():
        admin = Admin(config)
    with admin, only_new_collected():
        Server(config).run(on_ready=partial(_begin, admin))
    return YES


def _begin(admin: Admin, server: Server) -> None:
    # The first full pass goes over all that the start has made: 18 ms, and 0.4 s with a million
    # recovered blocks. It is made now, so that no request waits for it.
    gc.collect()
    tiers = server.tiers()
    memory = tiers["memory"]
    disk = f"disk {format_bytes(tiers['disk'].budget_bytes)}  " if "disk" in tiers else ""
    bucket = f"bucket {server.config.bucket}  " if "bucket" in tiers else ""
    print_lines(
        f"kvferry ready on {server.endpoint}  "
        f"memory {format_bytes(memory.budget_bytes)} in {memory.free_slabs} slabs  {disk}{bucket}"
        f"mover {what_moves()}  lanes {server.lanes}  "
        f"epoch {server.store.epoch}" + (f"  admin {admin.url}" if admin.url else "")
    )
    admin.serve(server)


COMMAND = Command(
    add_flags,
    run,
    description="Keep KV-cache blocks for vLLM engines on this or other hosts.",
    notes="Every setting may also be a variable, KVFERRY_MEMORY=8GiB, or a line of the file of "
    "--settings. SIGTERM or Ctrl-C drains and exits; a second one exits at once. With --all a "
    "server that ends is named with its status and is not started again; the others go on, and the "
    "exit status is 1 in the end.",
    examples="""\
kvferry serve --memory 16GiB                        # for engines on this host
kvferry serve --memory 64GiB --disk /nvme/kvferry --disk-bytes 1TiB
kvferry serve --bind tcp://0.0.0.0:5757 --keys /etc/kvferry/server.key \\
    --tenants /etc/kvferry/tenants.toml             # for other hosts; `kvferry keys` makes both
kvferry serve --settings /etc/kvferry/kvferry.toml --print-config
kvferry serve --settings fleet.toml --all           # several servers on this host
""",
)
