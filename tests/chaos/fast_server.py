"""A server whose clock runs many times as fast: `python -m tests.chaos.fast_server 60 --memory
16MiB …` sweeps its bucket every second."""

import sys
import time
from functools import partial
from unittest.mock import patch

from remote_server.cli.__main__ import run
from remote_server.cli.serving import serve
from remote_server.server.server import Server


def main(factor: float, arguments: list[str]) -> int:
    fast = partial(Server, clock=lambda: time.monotonic() * factor)
    with patch.object(serve, "Server", fast):
        return run("serve", arguments, "fast server")


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
