"""The weights that the workers run on, by their samples: which epoch they are, whether a block may
be a hit for a request, and whether it may be stored on the server.

An epoch is the value of the fact `weight_epoch`: None for the weights at start, else random. A
block of pool or server is a hit for a request once every worker has sampled its weights after the
request arrived, and they are those of the epoch: a client that changes the weights and then asks
gets no KV of the old ones, with or without a reset. A block is stored on the server once they have
sampled their weights after it was computed: other engines get no KV of the new ones under the old
name.
"""

from kv_connector.identity.weight_watch import Known
from kv_connector.identity.worker_reports import WorkerReport

# Besides the weights at start.
MOST_REMEMBERED = 64

MOST_STEPS_FOR_A_SAMPLE = 32
"""Steps that a request waits for a sample. The next step has it, or with steps in flight one of
the next few; on a GPU it is read one step later. A worker that cannot sample its weights any more
reports none, and then the request is computed."""

Weights = tuple[str, ...]


class WeightEpochs:
    """Digests by rank, epochs by digests, and the requests that wait for a sample. Only the
    scheduler thread uses it."""

    def __init__(self, num_workers: int) -> None:
        self._ranks = range(num_workers)
        self._at_start: dict[int, str] = {}
        self._samples: dict[int, Known] = {}
        """The last sample of each worker since the last reset, by rank."""
        self._epochs: dict[Weights, str | None] = {}
        self._not_watched = False
        self._since = 0
        """The number of the first sample after the last reset; 0 before any."""
        self._have_changed = False
        """Since the last reset, which follows a change at once, or when the pool can be emptied."""
        self._is_wanted = False
        self._arrived: dict[str, int] = {}
        """The number of the newest sample that was requested before, by request."""
        self._steps: dict[str, int] = {}
        """Steps in which a request has waited for a sample."""
        self.sample_request = 0
        """The number of the newest sample that the workers are to take."""
        self.epoch: str | None = None

    def reset(self, epoch: str | None) -> None:
        """The pool was emptied, and `epoch` begins, with unknown weights."""
        self.epoch = epoch
        self.sample_request += 1
        self._since = self.sample_request
        self._samples, self._have_changed = {}, False

    @property
    def undecided(self) -> bool:
        """Whether the epoch may still change, because workers have yet to report a sample."""
        return bool(self._since) and not self._not_watched and not self._is_answered

    @property
    def _is_answered(self) -> bool:
        return len(self._samples) == len(self._ranks)

    @property
    def _newest_of_all(self) -> int:
        """The number of the newest sample that every worker has taken; -1 before the first."""
        taken = (sample.sample_request for sample in self._samples.values())
        return min(taken) if self._is_answered else -1

    def on_report(self, report: WorkerReport) -> bool:
        """Take a worker's new report. Returns whether its weights have changed without a reset."""
        if not report.weights_at_start:
            self._not_watched = self._not_watched or report.facts is not None
            return False
        self._at_start.setdefault(report.rank, report.weights_at_start)
        if report.sample_request < self._since:
            return False  # a sample from before the reset
        expected = self._at_start[report.rank] if not self._since else None
        sample = self._samples.get(report.rank)
        before = expected if sample is None else sample.digest
        self._samples[report.rank] = Known(report.weights, report.sample_request)
        changed = before is not None and before != report.weights
        self._have_changed |= changed
        if self._is_answered and not changed:
            self._decide()
        return changed

    def _decide(self) -> None:
        if len(self._at_start) == len(self._ranks):
            self._epochs.setdefault(tuple(self._at_start[rank] for rank in self._ranks), None)
        weights = tuple(self._samples[rank].digest for rank in self._ranks)
        if weights not in self._epochs and len(self._epochs) > MOST_REMEMBERED:
            del self._epochs[list(self._epochs)[1]]
        self.epoch = self._epochs.setdefault(weights, self.epoch)

    # ── hits of a request ────────────────────────────────────────────────────────────────

    def arrived(self, request_id: str) -> None:
        """The engine has a new request."""
        self._arrived[request_id] = self.sample_request

    def finished(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        self._steps.pop(request_id, None)

    def are_sampled(self, request_id: str) -> bool:
        """Whether every worker has sampled its weights after this request arrived."""
        return self.confirms(self._arrived.get(request_id, self.sample_request))

    def await_sample(self, request_id: str) -> None:
        """The request has found blocks, and waits a step for a sample."""
        self._is_wanted |= self.sample_request <= self._arrived.get(request_id, -1)
        self._steps[request_id] = self._steps.get(request_id, 0) + 1

    def confirms(self, after: int) -> bool:
        """Whether every worker has taken a sample that was requested after this number, and has
        had no other weights since the last reset. Always where weights are not watched."""
        if self._not_watched:
            return True
        return not self._have_changed and self._newest_of_all > after

    def await_sample_of_stores(self) -> None:
        """Blocks are to be stored on the server. One sample is under way for them at a time: so
        engines that store in each step sample in every second one."""
        if self._newest_of_all >= self.sample_request:
            self._is_wanted = True

    def waits_too_long(self, request_id: str) -> bool:
        return self._steps.get(request_id, 0) > MOST_STEPS_FOR_A_SAMPLE

    def request_of_step(self) -> int:
        """The number of the newest sample for the workers of a step."""
        self.sample_request += self._is_wanted
        self._is_wanted = False
        return self.sample_request
