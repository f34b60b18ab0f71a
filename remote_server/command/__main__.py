"""`python -m remote_server.command`: `kvferry` where its script is not on the PATH."""

import sys

from remote_server.command import main

sys.exit(main())
