"""A thread that faults memory in, however many arenas there are."""

import logging
import threading
from collections.abc import Sequence

from remote_server.shm.arena import Arena

log = logging.getLogger(__name__)


class Population:
    """Touches the pages of `arenas`, a step of each in turn, on one daemon thread that starves
    nobody. Ends by itself when all are done or closed."""

    def __init__(self, arenas: Sequence[Arena]) -> None:
        self._arenas = [*arenas]
        self.failed = False
        """It has ended before it was done, and nothing stopped it."""
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def _run(self) -> None:
        left = self._arenas
        try:
            while left:
                left = [arena for arena in left if arena.populate_some()]
        except Exception:
            self.failed = True
            log.exception("the memory is populated no further; first puts are slower")
