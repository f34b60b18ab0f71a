"""What the source document reports, in seconds, to stand beside what is measured here.

Its machine is not named there (an RTX 4090 host, by other pages of it). These numbers are quoted,
never computed with, except for one column: the document's "delta-get" repeats the delta of the
deferred set, so get / naive is computed here from its own seconds.
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
