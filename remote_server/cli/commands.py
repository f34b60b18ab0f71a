"""The list of `kvferry`'s commands: each is a module of a room of this package, with a `COMMAND`.

The list has what `kvferry --help` shows, so that no module is imported before its command runs: the
client and the server behind them take ten times as long to import as Python takes to start.
"""

from importlib import import_module

from remote_server.cli.parser import Command

GROUPS: dict[str, dict[str, str]] = {
    "set up": {
        "advise": "the hit rate and the cost of a cache, from recorded requests",
        "init": "write the files for servers and engines, from a few answers",
        "serve": "run one cache server in the foreground",
        "keys": "make key files for a server and its tenants",
        "completion": "print the completion of commands and flags for a shell",
    },
    "look": {
        "top": "a screen of hit rates, throughput, occupancy and engines",
        "stats": "contents of a server, and its counts since its start",
        "watch": "changes on a server, line by line",
        "why": "why an engine gets no hits: which setting differs",
        "doctor": "check this host, the bucket, the server and its engines",
        "bench": "the cache's speed beside raw sockets and a memory copy",
        "record": "a trace of a server's requests that shows no prompt",
    },
    "change": {
        "clear": "remove the blocks of one namespace, or all",
        "pin": "keep blocks from eviction",
        "unpin": "let pinned blocks be evicted again",
        "drain": "end a server in order, or write its packs to the bucket first",
        "bucket": "the packs of a bucket: list, count, remove, verify",
    },
}
"""The commands and their lines in the help, in its order."""

COMMANDS: dict[str, str] = {name: text for group in GROUPS.values() for name, text in group.items()}


ROOMS: dict[str, tuple[str, ...]] = {
    "figures": ("stats", "top", "watch"),
    "blocks": ("bucket", "clear", "pin", "unpin", "why"),
    "serving": ("drain", "serve"),
    "setup": ("completion", "init", "keys"),
    "checks": ("bench", "doctor"),
    "traces": ("advise", "record"),
}
"""The commands of each room."""


def module_of(name: str) -> str:
    """The module of the command `name`, of `COMMANDS`."""
    room = next(room for room, names in ROOMS.items() if name in names)
    return f"remote_server.cli.{room}.{name}"


def load(name: str) -> Command:
    """The command `name`, of `COMMANDS`."""
    command: Command = import_module(module_of(name)).COMMAND
    return command
