"""`python -m remote_server.cli`: `kvferry` where its script is not on the PATH."""

import sys

from remote_server.cli import main

sys.exit(main())
