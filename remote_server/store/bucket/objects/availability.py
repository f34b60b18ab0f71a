"""Availability of the object store: whether it is called at all while its calls fail."""

import logging
from collections.abc import Callable, Hashable

from remote_server.store.bucket.objects.objects import Failure

log = logging.getLogger(__name__)


class Availability:
    """Whether the store is called: after failures that concern all objects it is left alone for a
    while, which doubles. The log has a line when that begins, and one when the store is back. One
    thread."""

    FIRST_PAUSE_S = 1.0
    LONGEST_PAUSE_S = 60.0
    THRESHOLD = 3

    def __init__(self, clock: Callable[[], float], url: str = "") -> None:
        """`url` is for the log."""
        self.num_refused = 0
        """Lookups that the store was not called for, because it is left alone."""
        self._clock = clock
        self._url = url
        self._away_since: float | None = None
        self._refused_before = 0
        self._failing: set[Hashable] = set()
        self._pause_s = self.FIRST_PAUSE_S
        self._closed_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._closed_until

    @property
    def paused_s(self) -> float:
        """For how long it has failed; 0: it is called and answers."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def refuse(self) -> None:
        """A lookup goes on without the store."""
        self.num_refused += 1

    def succeeded(self) -> None:
        """A call went well. One that was begun before a pause does not end it."""
        if not self.is_open:
            return
        if self._away_since is not None:
            log.warning(
                "bucket: %s answers again after %.1f s; %d lookups went on without it",
                self._url, self.paused_s, self.num_refused - self._refused_before,
            )  # fmt: skip
            self._away_since = None
        self._pause_s, self._closed_until = self.FIRST_PAUSE_S, 0.0
        self._failing.clear()

    def failed(self, failure: Failure, of: Hashable = None) -> bool:
        """A call for the object `of`, or for none alone, has failed. True when this began a pause.
        A single object that cannot be read, again and again, begins none."""
        if failure in (Failure.ABSENT, Failure.SHORT):
            return False
        of_all = of is None or failure in (Failure.UNREACHABLE, Failure.TIMEOUT)
        if len(self._failing) < self.THRESHOLD:
            self._failing.add(object() if of_all else of)
        # What is throttled fails for the next call as well.
        at_once = failure is Failure.THROTTLED or (failure is Failure.FORBIDDEN and of is None)
        if not self.is_open or (len(self._failing) < self.THRESHOLD and not at_once):
            return False
        self._closed_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self.LONGEST_PAUSE_S)
        if self._away_since is None:
            self._away_since, self._refused_before = self._clock(), self.num_refused
            log.warning("bucket: %s fails (%s): it is left alone for a while, again and again "
                        "until it answers", self._url, failure)  # fmt: skip
        return True
