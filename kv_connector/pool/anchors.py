"""Anchors of a request's rows: the keys by which a fleet of servers places the runs of a prompt."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import islice

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import TransferJob

from kv_connector.pool.rows import Places, PoolRows
from remote_server.protocol import MAX_TOKENS
from remote_server.runs import begins_run, end_of, run_of

logger = init_logger("vllm.kvferry.run_anchors")


class RunAnchors:
    """Finds the anchor of each row of one request. Only the scheduler thread uses it.

    Each KV cache group has a chain of its own, and so anchors of its own. vLLM's record of all keys
    of the request is read once, and again when a row is in a run that began since.
    """

    def __init__(self, rows: PoolRows, positions: Mapping[OffloadKey, int]) -> None:
        """`positions` are the ends of all keys of the request, in the order in which vLLM made
        them. It is read later, too."""
        self._positions = positions
        self._tokens_of_group = rows.tokens_of_group
        self._first_ends = _ends_of_first_rows(tuple(rows.tokens_of_group.values()))
        self._anchors: dict[tuple[int, int], OffloadKey] = {}
        """By group and run."""
        self._num_read = 0

    def of(self, keys: Sequence[bytes], ends: Sequence[int | None]) -> list[bytes | None]:
        """The anchor of each of `keys`, whose tokens end at `ends`; None where it is not known."""
        anchors, complete = self._known(keys, ends)
        if not complete and self._num_read < len(self._positions):
            self._read_on()
            anchors, _ = self._known(keys, ends)
        return anchors

    def rows_of(self, anchor: bytes) -> dict[OffloadKey, int]:
        """The rows of the run of `anchor` in this request, with their ends; read anew."""
        for (group, run), key in self._anchors.items():
            if key == anchor:
                return {
                    row: end
                    for row, end in [*self._positions.items()]
                    if end and run_of(end) == run and get_offload_group_idx(row) == group
                }
        return {}

    def _read_on(self) -> None:
        new = islice(self._positions.items(), self._num_read, None)
        self._num_read = len(self._positions)
        wanted = self._first_ends  # most keys are passed over here
        for key, end in [item for item in new if item[1] in wanted]:
            group = get_offload_group_idx(key)
            tokens = self._tokens_of_group.get(group)
            if tokens and end % tokens == 0 and begins_run(end - tokens, end):
                self._anchors.setdefault((group, run_of(end)), key)

    def _known(
        self, keys: Sequence[bytes], ends: Sequence[int | None]
    ) -> tuple[list[bytes | None], bool]:
        """The known anchors, and whether these are all."""
        if len(self._tokens_of_group) == 1 and ends and (first := ends[0]) is not None:
            ((group, step),) = self._tokens_of_group.items()
            if ends == [*range(first, first + len(ends) * step, step)]:
                return self._of_neighbours(group, step, first, len(ends))
        anchors: list[bytes | None] = []
        complete = True
        for key, end in zip(keys, ends, strict=True):
            anchor = None
            if end:
                anchor = self._anchors.get((get_offload_group_idx(OffloadKey(key)), run_of(end)))
                complete &= anchor is not None
            anchors.append(anchor)
        return anchors, complete

    def _of_neighbours(
        self, group: int, step: int, end: int, num_rows: int
    ) -> tuple[list[bytes | None], bool]:
        """The same for `num_rows` rows of `group`, of `step` tokens each, the first of which ends
        at `end`."""
        anchors: list[bytes | None] = []
        complete = True
        run = run_of(end)
        while len(anchors) < num_rows:
            next_end = end + len(anchors) * step
            if number := min(num_rows - len(anchors), (end_of(run) - next_end) // step + 1):
                anchor = self._anchors.get((group, run))
                complete &= anchor is not None
                anchors += [anchor] * number
            run += 1
        return anchors, complete


@cache
def _ends_of_first_rows(row_sizes: tuple[int, ...]) -> frozenset[int]:
    """Where the first rows of runs can end, for rows of these numbers of tokens."""
    ends = set()
    for tokens in row_sizes:
        token = 0
        for run in range(run_of(MAX_TOKENS) + 1):
            ends.add(token // tokens * tokens + tokens)
            token = end_of(run)
    return frozenset(ends)


def run_anchors(rows: PoolRows, req_context: ReqContext) -> RunAnchors | None:
    """The anchors of a request; None, logged once, with a vLLM that does not record its keys."""
    positions = getattr(req_context, "_offload_key_positions", None)
    if isinstance(positions, dict):
        return RunAnchors(rows, positions)
    _log_unknown()
    return None


@cache
def _log_unknown() -> None:
    logger.warning(
        "this vLLM does not record the keys of a request: blocks are placed one by one on the "
        "servers, and the loss of one server ends almost every prefix"
    )


def places_of(job: TransferJob, known: int = -1, anchors: RunAnchors | None = None) -> Places:
    """The places of the job's keys in its prompt, for a request of the class `known`."""
    position = job.req_context.get_offload_key_position
    if anchors is None:
        return {key: (position(key), known, None) for key in job.keys}
    keys = [*job.keys]
    ends = [*map(position, keys)]
    found = zip(keys, ends, anchors.of(keys, ends), strict=True)
    return {key: (end, known, anchor) for key, end, anchor in found}
