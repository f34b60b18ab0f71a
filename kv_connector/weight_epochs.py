"""Which weights the workers have now, and under which epoch's name their blocks are kept.

Every reset begins a new epoch and a new *look*: all workers take a sample of their weights. When
all have answered and the weights are those of an earlier epoch, that one's name is right again:
after sleep and wake, or after an update was taken back. A worker whose sample differs from the one
that it answered the look with has new weights that no reset announced.
"""

from kv_connector.worker_report import WorkerReport

# Beside the weights of the start.
MOST_REMEMBERED = 64

Weights = tuple[str, ...]


class WeightEpochs:
    """Digests by rank, epochs by digests. The scheduler thread alone uses it.

    An epoch is what the fact `weight_epoch` is: None for the weights of the start, a random value
    otherwise.
    """

    def __init__(self, num_workers: int) -> None:
        self._ranks = range(num_workers)
        self._at_start: dict[int, str] = {}
        self._answers: dict[int, str] = {}
        self._epochs: dict[Weights, str | None] = {}
        self._not_watched = False
        self.look = 0
        self.epoch: str | None = None

    def reset(self, epoch: str | None) -> None:
        """The pool was emptied, and `epoch` begins. The weights may be any."""
        self.epoch = epoch
        self.look += 1
        self._answers = {}

    @property
    def undecided(self) -> bool:
        """Whether the name of the epoch may still change, when the look is answered."""
        return bool(self.look) and not self._not_watched and not self._is_answered

    @property
    def _is_answered(self) -> bool:
        return len(self._answers) == len(self._ranks)

    def heard(self, report: WorkerReport) -> bool:
        """A worker's report is news. Gives whether its weights have changed without a reset."""
        if not report.weights_at_start:
            self._not_watched = self._not_watched or report.facts is not None
            return False
        self._at_start.setdefault(report.rank, report.weights_at_start)
        if report.look != self.look:
            return False  # of before the reset
        expected = self._at_start[report.rank] if not self.look else None
        before = self._answers.get(report.rank, expected)
        self._answers[report.rank] = report.weights
        changed = before is not None and before != report.weights
        if self._is_answered and not changed:
            self._decide()
        return changed

    def _decide(self) -> None:
        if len(self._at_start) == len(self._ranks):
            self._epochs.setdefault(tuple(self._at_start[rank] for rank in self._ranks), None)
        weights = tuple(self._answers[rank] for rank in self._ranks)
        if weights not in self._epochs and len(self._epochs) > MOST_REMEMBERED:
            del self._epochs[list(self._epochs)[1]]
        self.epoch = self._epochs.setdefault(weights, self.epoch)
