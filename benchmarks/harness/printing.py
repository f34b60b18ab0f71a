"""Output to a pipe that its reader closes early."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tolerate_closed_pipe() -> Iterator[None]:
    """Context of the last printing, after all files are written: `| head -1` cuts it short and
    changes neither the exit status nor stderr."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        # The rest of the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
