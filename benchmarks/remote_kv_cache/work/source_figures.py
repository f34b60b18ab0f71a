"""The source document's figures, in seconds, for display beside those measured here.

The document does not name its machine (an RTX 4090 host, by its other pages). These numbers are
quoted and never computed with, except for one column: the document's "delta-get" repeats the delta
of the deferred set, so get / naive is computed here from its own seconds.
"""

from typing import NamedTuple

LABEL = "  (the source's, 512 blocks)"


class MemoryIO(NamedTuple):
    l2l_naive: float
    b2b_naive: float
    b2b_fancy_index: float
    b2b_index_copy: float
    b2b_cython_memcpy: float
    swap_in: float
    swap_out: float


class ZmqTransfer(NamedTuple):
    naive: float
    tcp: float
    ipc: float
    inproc: float
    delta_tcp: float
    delta_ipc: float
    delta_inproc: float


class Server(NamedTuple):
    naive: float
    set_not_deferred: float
    set_deferred: float
    get: float
    stream_get: float
    delta_set_not_deferred: float
    delta_set_deferred: float
    delta_stream_get: float

    @property
    def delta_get(self) -> float:
        return self.get / self.naive


MEMORY_IO = {
    "Qwen2.5-32B-Instruct": MemoryIO(0.277, 0.130, 0.335, 0.336, 0.165, 0.19, 0.21),
    "Qwen2.5-7B-Instruct": MemoryIO(0.088, 0.033, 0.077, 0.077, 0.059, 0.06, 0.06),
    "Qwen2.5-3B-Instruct": MemoryIO(0.090, 0.024, 0.049, 0.049, 0.031, 0.08, 0.08),
    "glm-4-9b-chat-1m": MemoryIO(0.126, 0.045, 0.107, 0.108, 0.056, 0.09, 0.09),
    "Llama-3.1-8B": MemoryIO(0.140, 0.065, 0.160, 0.161, 0.082, 0.09, 0.10),
}

ZMQ_TRANSFER = {
    "Qwen2.5-32B-Instruct": ZmqTransfer(0.13, 0.56, 0.57, 0.13, 4.27, 4.37, 1.02),
    "Qwen2.5-7B-Instruct": ZmqTransfer(0.03, 0.12, 0.12, 0.04, 3.55, 3.65, 1.14),
    "Qwen2.5-3B-Instruct": ZmqTransfer(0.02, 0.10, 0.07, 0.03, 3.95, 2.93, 1.11),
    "glm-4-9b-chat-1m": ZmqTransfer(0.04, 0.18, 0.17, 0.05, 4.00, 3.78, 1.20),
    "Llama-3.1-8B": ZmqTransfer(0.06, 0.30, 0.29, 0.08, 4.55, 4.53, 1.19),
}

SERVER = {
    "Qwen2.5-32B-Instruct": Server(0.13, 0.52, 0.41, 0.77, 0.33, 4.01, 3.16, 2.53),
    "Qwen2.5-7B-Instruct": Server(0.03, 0.13, 0.09, 0.24, 0.07, 3.76, 2.72, 2.10),
    "Qwen2.5-3B-Instruct": Server(0.02, 0.07, 0.05, 0.17, 0.06, 3.08, 2.15, 2.61),
    "glm-4-9b-chat-1m": Server(0.04, 0.15, 0.10, 0.29, 0.09, 3.33, 2.31, 2.06),
    "Llama-3.1-8B": Server(0.06, 0.27, 0.21, 0.50, 0.13, 4.17, 3.19, 1.96),
}


class TransferOut(NamedTuple):
    """Requests a second: CPU pool alone and with the server, by the key's scheduling."""

    swap_out: float
    transfer_out: float

    @property
    def delta(self) -> float:
        return self.transfer_out / self.swap_out


_TOKENS = (1024, 768, 512, 384, 256, 128, 64, 32)

_TRANSFER_OUT = {
    ("on", "sync"): (
        (2.45, 2.37), (2.28, 2.21), (2.31, 2.24), (2.03, 1.95),
        (1.74, 1.69), (1.08, 1.06), (0.56, 0.55), (0.29, 0.29),
    ),
    ("on", "async"): (
        (2.59, 2.46), (2.53, 2.41), (2.50, 2.51), (2.31, 2.32),
        (2.20, 2.14), (1.42, 1.38), (0.74, 0.73), (0.38, 0.38),
    ),
    ("off", "sync"): (
        (2.44, 2.40), (2.29, 2.23), (2.37, 2.25), (2.07, 1.95),
        (1.74, 1.69), (1.08, 1.07), (0.56, 0.56), (0.29, 0.28),
    ),
    ("off", "async"): (
        (2.57, 2.47), (2.51, 2.41), (2.52, 2.52), (2.30, 2.34),
        (2.10, 2.01), (1.41, 1.39), (0.74, 0.73), (0.38, 0.38),
    ),
}  # fmt: skip

TRANSFER_OUT = {
    (cache, scheduling, tokens): TransferOut(*pair)
    for (cache, scheduling), pairs in _TRANSFER_OUT.items()
    for tokens, pair in zip(_TOKENS, pairs, strict=True)
}
"""By the engine's cache, its scheduling and the tokens of a step, on Qwen2.5-3B. Its `async-2`, two
steps in flight, is the nearest to vLLM's async scheduling."""

LONG_PREFILL = {
    "on": {
        2: (0.88, 47.94, 48.69, 5.54, 48.28, 48.80), 4: (0.88, 24.92, 24.91, 5.03, 24.78, 24.98),
        8: (0.86, 12.64, 12.64, 4.13, 12.60, 12.63), 16: (0.81, 6.35, 6.36, 4.01, 6.35, 6.35),
        32: (0.72, 3.18, 3.18, 2.63, 3.18, 3.18), 64: (0.59, 1.59, 1.59, 1.44, 1.59, 1.59),
        128: (0.43, 0.80, 0.80, 0.75, 0.80, 0.80),
    },
    "off": {
        2: (0.89, 9.26, 9.26, 5.56, 9.27, 9.28), 4: (0.89, 7.71, 7.71, 5.00, 7.72, 7.67),
        8: (0.86, 5.80, 5.80, 4.19, 5.78, 5.78), 16: (0.81, 4.68, 4.69, 4.07, 4.69, 4.69),
        32: (0.72, 2.91, 2.91, 2.65, 2.92, 2.92), 64: (0.59, 1.52, 1.52, 1.44, 1.52, 1.52),
        128: (0.43, 0.78, 0.78, 0.76, 0.78, 0.78),
    },
}  # fmt: skip
"""Requests a second by the engine's cache, the length of the answers, and run 1 to 6: the first
computes, the fourth comes after a restart. Qwen2.5-7B, prompts of 10,240 tokens."""

TRANSFER_IN = (
    "the source's, 3B: 20 requests a second in the first pass at 0 %, 50 to 60 in the second"
)
