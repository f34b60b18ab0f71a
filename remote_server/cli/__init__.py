"""`kvferry`: commands that run, inspect and change a server.

One file a subcommand, each with `add` (its flags) and a function that returns the exit status:

    0   yes, done, healthy
    1   no: a check failed, or nothing was found
    2   wrong usage: an invalid flag, setting or file
    3   no server answered

Results go to stdout, errors to stderr; `--json` prints one object for scripts.
"""

import argparse
import sys
from collections.abc import Sequence

from remote_server.cli import bench, clear, doctor, keys, pin, serve, stats, watch, why
from remote_server.cli.common import NoServer, complain
from remote_server.errors import ConfigError, KVFerryError

COMMANDS = (serve, keys, stats, why, doctor, watch, clear, pin, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; see above."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    read_by_themselves = {"serve": serve.run_with, "keys": keys.run_with}
    if given and (run_with := read_by_themselves.get(given[0])) is not None:
        return run_with(given[1:])
    flags = _parser().parse_args(given)
    try:
        return int(flags.run(flags))
    except NoServer as error:
        complain(str(error))
        return 3
    except ConfigError as error:
        complain(str(error))
        return 2
    except KVFerryError as error:
        complain(str(error))
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
    for command in COMMANDS:
        command.add(commands)
    return parser
