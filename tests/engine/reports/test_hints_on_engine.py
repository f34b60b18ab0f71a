"""Hints that a real engine's requests bring reach what its server learns.

What they are worth there is judged in `tests/benchmarks/remote_kv_cache/replay/test_hinted.py`,
and over the wire in `test_eviction_judged.py` beside it.
"""

from cluster import BLOCK, PATIENCE_S, Cluster, Engine, declared

from examples.tiny_model import prompt_tokens
from remote_server.protocol import Stretch
from remote_server.store.eviction.hazard import PER_SAMPLE, UPDATE_EVERY

ROWS = 60

HINTS = [{"returns": "no"}, *[{"returns": "yes", "within_s": 20}] * 8]
"""A prompt of each answer: a namespace that always gives the same is not believed."""


def test_the_server_learns_of_the_hints_of_requests(engine: Engine, cluster: Cluster):
    for number, hint in enumerate(HINTS):
        prompt = prompt_tokens(ROWS * BLOCK + 3, seed=61_000 + number)
        engine.ask(prompt, 1, kv_transfer_params={"kvferry": hint})
    namespace = declared(cluster.client, engine)
    # What was seen is shown after so many keys of any kind.
    for first in range(0, 2 * UPDATE_EVERY * PER_SAMPLE, ROWS):
        keys = [b"key %d" % number for number in range(first, first + ROWS)]
        chain = [Stretch(ROWS, 0, 0, BLOCK)]
        cluster.client.lookup(namespace, keys, timeout_s=PATIENCE_S, chain=chain).result()
    learned = cluster.stats().eviction
    assert learned is not None
    assert "turn 1, back in 1 min" in learned.returns
