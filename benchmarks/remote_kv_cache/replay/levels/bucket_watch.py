"""Requests of a replay as the model of the bucket sees them, and the tokens that no pack has."""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from remote_server.traces.model_bucket import BucketModel, Shape
from remote_server.traces.trace import Request


class BucketWatch:
    """Shows each request of a replay to the bucket's model. Requests do not overlap."""

    def __init__(self, bucket: BucketModel) -> None:
        self._bucket = bucket
        self._keys: Sequence[bytes] = ()
        self._seen: set[bytes] = set()
        """What unlimited memory has."""

    def arrived(self, request: Request, keys: Sequence[bytes], in_pool: int) -> None:
        self.settle()
        self._keys = keys
        self._bucket.looked_up(request.arrival_s, keys[in_pool:], in_pool)

    def found(self, num_found: int) -> None:
        unlimited = len([*takewhile(self._seen.__contains__, self._keys)])
        if num_found < unlimited:
            self._bucket.missed(self._keys[num_found], unlimited - num_found)

    def settle(self) -> None:
        """The puts of the last request have ended."""
        self._bucket.stored(self._keys)
        self._seen.update(self._keys)
        self._keys = ()


class Tails(NamedTuple):
    """Tokens of a trace's prompts in whole rows, and those of them in no pack."""

    tokens: int
    lost: int


def tails(requests: Sequence[Request], shape: Shape) -> Tails:
    """Counted over the trace alone."""
    whole = [request.input_tokens // shape.row_tokens for request in requests]
    packed = sum(shape.num_rows_in_packs(request.input_tokens) for request in requests)
    return Tails(sum(whole) * shape.row_tokens, (sum(whole) - packed) * shape.row_tokens)
