"""`python -m remote_server --memory 8GiB`: `kvferry serve`, run one cache server."""

import sys

from remote_server.cli.__main__ import run

if __name__ == "__main__":
    sys.exit(run("serve", sys.argv[1:], "python -m remote_server"))
