"""Engines that a benchmark drives: the interface, and real vLLM behind it.

    driver         the interface: settings, requests, answers, counters, and the Engine protocol
    vllm_engine    a real vLLM engine in a process of its own, over the interface
    vllm_process   the program of that process: `python -m benchmarks.engine.vllm_process`
    worker_watch   code inside vLLM's worker that records when it computed and when it copied
    slow_engine    `vllm serve` whose steps take as long as the caller chooses
    slow_worker    its worker: sleeps at the end of a step

A benchmark imports `driver` alone, so that another kind of engine can replace vLLM.
`benchmarks.engine` imports nothing from vLLM before such a process is started.
"""
