"""Engines that a benchmark drives: what one is asked and what it tells, and real vLLM behind it.

    driver         the interface: settings, requests, answers, counters, and the Engine protocol
    vllm_engine    a real vLLM engine in a process of its own, over the interface
    vllm_process   that process: `python -m benchmarks.engine.vllm_process`
    worker_watch   runs inside vLLM's worker: when it computed and when it copied
    slow_engine    `vllm serve` whose steps take as long as the caller chooses
    slow_worker    the worker of it: sleeps at the end of a step

A benchmark is written against `driver` alone, so that another kind of engine can take vLLM's
place. `benchmarks.engine` imports nothing from vLLM before such a process is started.
"""
