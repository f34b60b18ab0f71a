"""Second calls for reads that take unusually long: when one is worth a request."""

from collections import deque
from collections.abc import Callable, Sequence

from remote_server.store.bucket.objects.objects import Failure

SHORTEST_S = 0.05
"""No read is called late before this: a store's first byte takes 20 to 100 ms."""

STUCK_S = 2.0
"""A call that has brought nothing for so long, or for `STUCK_READS` reads of its size, is stuck.
It is the time after which the store's client gives up a connection without bytes."""

STUCK_READS = 4

SHARE = 0.05
"""Second calls for each first one, on average."""

MOST_SAVED = 4.0
"""Second calls that may come together after a time without any."""

QUIET_S = 60.0
"""After a throttled call the store gets no second calls for so long."""

KEPT_SAMPLES = 64
LEAST_SAMPLES = 16
PERCENTILE = 0.95


class Hedging:
    """Recent times of reads by size, and the budget of second calls. One thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._times: dict[int, deque[float]] = {}
        """By the power of two above the bytes of a read."""
        self._saved = 1.0
        self._quiet_until = 0.0

    def first_call(self) -> None:
        """A read begins."""
        self._saved = min(self._saved + SHARE, MOST_SAVED)

    def took(self, num_bytes: int, seconds: float) -> None:
        """A call has brought `num_bytes` after `seconds`."""
        kept = self._times.setdefault(num_bytes.bit_length(), deque(maxlen=KEPT_SAMPLES))
        kept.append(seconds)

    def failed(self, failure: Failure) -> None:
        """A call of the store has failed."""
        if failure is Failure.THROTTLED:
            self._quiet_until = self._clock() + QUIET_S

    def is_due(self, num_bytes: int, running_s: float) -> bool:
        """Whether a read of `num_bytes` that runs for `running_s` is slower than most: then a
        second call may be taken."""
        usual_s = self._usual_s(num_bytes)
        return usual_s is not None and running_s >= max(usual_s, SHORTEST_S)

    def take(self) -> bool:
        """Take one second call out of the budget; False when there is none."""
        if self._saved < 1 or self._clock() < self._quiet_until:
            return False
        self._saved -= 1
        return True

    def is_stuck(self, num_bytes: int, running_s: float) -> bool:
        """Whether a read that runs for `running_s` has to be counted as a failure."""
        usual_s = self._usual_s(num_bytes) or 0.0
        return running_s >= max(STUCK_S, STUCK_READS * usual_s)

    def _usual_s(self, num_bytes: int) -> float | None:
        """The 95th percentile of the recent reads of this size; None while there are few."""
        times = self._times.get(num_bytes.bit_length(), ())
        return percentile(times) if len(times) >= LEAST_SAMPLES else None


def percentile(times: Sequence[float]) -> float:
    """The time that `PERCENTILE` of `times` do not exceed. At least one."""
    return sorted(times)[min(len(times) - 1, int(PERCENTILE * len(times)))]
