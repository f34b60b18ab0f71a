"""`kvferry`, or `python -m remote_server.cli`: the list of its commands.

Each has `add`, which declares its flags, and a function that returns the exit status:

    0   yes, done, healthy
    1   no: a check failed, or nothing was found
    2   wrong usage: an invalid flag, setting or file
    3   no server answered

Results go to stdout, errors to stderr; `--json` prints one object for scripts.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from remote_server import __main__ as server_main
from remote_server import keys
from remote_server.cli import NoServer, bench, blocks, bucket, doctor, drain, print_error, stats
from remote_server.errors import ConfigError, KVFerryError

DELEGATED: dict[str, tuple[Callable[..., int], str]] = {
    "serve": (server_main.main, "run one cache server in the foreground"),
    "keys": (keys.main, "make key files for a server and its tenants"),
}
"""Commands that read their own flags, as `python -m remote_server` and `remote_server.keys` do."""


def _add_delegated(name: str, commands: Any) -> None:
    run, text = DELEGATED[name]
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, add_help=False)
    parser.set_defaults(run=lambda _: run(["--help"], prog=f"kvferry {name}"))


COMMANDS: dict[str, Callable[[Any], None]] = {
    **{name: partial(_add_delegated, name) for name in DELEGATED},
    "stats": stats.add,
    "why": blocks.add_why,
    "doctor": doctor.add,
    "watch": stats.add_watch,
    "clear": blocks.add_clear,
    "pin": blocks.add_pin,
    "bucket": bucket.add,
    "drain": drain.add,
    "bench": bench.add,
}
"""Each adds the parser of its command, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; see above."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in DELEGATED:
        return DELEGATED[given[0]][0](given[1:], prog=f"kvferry {given[0]}")
    flags = _parser().parse_args(given)
    try:
        return int(flags.run(flags))
    except NoServer as error:
        print_error(str(error))
        return 3
    except ConfigError as error:
        print_error(str(error))
        return 2
    except KVFerryError as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `kvferry stats | head`: the reader has closed the pipe
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Run, inspect and change a KV-cache server.",
        epilog="Exit status: 0 yes, 1 no, 2 wrong usage, 3 no server answered.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS.values():
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
