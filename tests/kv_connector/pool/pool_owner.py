"""Run in a process of its own, which imports neither vLLM nor the tests."""

import multiprocessing

from kv_connector.pool.pool_file import engine_core_pid


def report_owner(backend: str, answer: "multiprocessing.Queue[int]") -> None:
    """The engine core as a worker in this process sees it."""
    answer.put(engine_core_pid(in_worker=True, executor_backend=backend))


def report_owner_from_a_child(backend: str, answer: "multiprocessing.Queue[int]") -> None:
    """The same from a child of this process, as where something else than the engine core starts
    the workers."""
    child = multiprocessing.get_context("fork").Process(target=report_owner, args=(backend, answer))
    child.start()
    child.join(60)
