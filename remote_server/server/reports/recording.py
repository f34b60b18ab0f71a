"""Recording: the latest requests of one tenant, for as long as a client asks for them.

`kvferry record` writes a trace of them. Each client that asks has its own place in them, as the
number of the last request that it has received, so several may record at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from remote_server.errors import RequestRefused
from remote_server.protocol import (
    SELF_TESTS,
    Record,
    Recorded,
    RecordedRequest,
    Stretch,
    check_chain,
)
from remote_server.values import MiB

RING_BYTES = 16 * MiB
"""Of the requests that are remembered; the oldest is forgotten for a newer one."""

REPLY_BYTES = 1 * MiB
"""Of the requests in one reply, which has one at least."""

IDLE_S = 10.0
"""When no query came for so long, all is forgotten, and nothing is remembered any more."""

BYTES_PER_REQUEST = 600
"""Of a remembered request, beside its keys, its states and its chain fields."""

BYTES_PER_STRETCH = 160


class Recording:
    """The last requests. One thread."""

    def __init__(self, number: int, last: int) -> None:
        """`number` is that of this recording; `last` is that of the last request before it."""
        self.number = number
        self.last = last
        self.num_bytes = 0
        self._requests: deque[RecordedRequest] = deque()

    def add(self, request: RecordedRequest) -> None:
        self.last += 1
        self._requests.append(request)
        self.num_bytes += size_of(request)
        while self.num_bytes > RING_BYTES and len(self._requests) > 1:
            self.num_bytes -= size_of(self._requests.popleft())

    def behind(self, after: int) -> tuple[int, list[RecordedRequest]]:
        """How many of those behind number `after` are forgotten, and the first of the others: as
        many as one reply has."""
        first = self.last - len(self._requests) + 1
        lost = max(0, first - 1 - after)
        taken: list[RecordedRequest] = []
        num_bytes = 0
        for request in islice(self._requests, max(0, after + 1 - first), None):
            num_bytes += size_of(request)
            if taken and num_bytes > REPLY_BYTES:
                break
            taken.append(request)
        return lost, taken


class Recorder:
    """Switches a tenant's recording on and off. Its users read `recording` before they call."""

    def __init__(
        self, clock: Callable[[], float], block_bytes: Callable[[str], int] = lambda _: 0
    ) -> None:
        """`block_bytes` gives the declared size of a namespace's blocks, 0 of an unknown one."""
        self.recording: Recording | None = None
        """None: no client asks."""
        self._clock = clock
        self._block_bytes = block_bytes
        self._asked_at = 0.0
        self._number = 0
        self._last = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self.recording is None else self.recording.num_bytes

    def answer(self, request: Record, epoch: str) -> Recorded:
        """The reply to a query, which switches the recording on."""
        self._asked_at = now = self._clock()
        recording = self.recording
        if recording is None:
            self._number += 1
            recording = self.recording = Recording(self._number, self._last)
        last = recording.last
        after = last if request.after is None else min(request.after, last)
        lost, requests = recording.behind(after)
        came = after + lost + len(requests)
        return Recorded(
            request_id=request.request_id, epoch=epoch, recording=recording.number, now_s=now,
            last=came, lost=lost, more=came < last, requests=requests,
        )  # fmt: skip

    def expire(self) -> None:
        """To be called now and then: forget all when no client asks any more."""
        if self.recording is not None and self._clock() - self._asked_at >= IDLE_S:
            self._last = self.recording.last
            self.recording = None

    def add(
        self, kind: str, namespace: str, keys: Sequence[bytes], chain: Sequence[Stretch] = (),
        states: bytes = b"",
    ) -> None:  # fmt: skip
        """A request has come. Those of self-tests are left out, and those that no engine sends:
        without keys, with a key twice, with keys of several lengths, or with wrong chain fields."""
        if self.recording is None or not keys or namespace.startswith(SELF_TESTS):
            return
        key_bytes, packed = len(keys[0]), b"".join(keys)
        if len(packed) != key_bytes * len(keys) or len({*map(len, keys)}) > 1:
            return
        if len({*keys}) < len(keys):
            return
        try:
            check_chain(chain, len(keys))
        except RequestRefused:
            return
        size = self._block_bytes(namespace)
        request = RecordedRequest(
            kind, self._clock(), namespace, size, packed, key_bytes, [*chain], states
        )
        self.recording.add(request)


def size_of(request: RecordedRequest) -> int:
    """The memory of a request, about."""
    stretches = BYTES_PER_STRETCH * len(request.chain)
    return BYTES_PER_REQUEST + len(request.keys) + len(request.states) + stretches
