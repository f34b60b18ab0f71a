"""A cache of KV blocks in three levels, over ZeroMQ: the document of the repeated benchmarks."""

from collections.abc import Iterable, Mapping

from benchmarks.harness.source import Cell, Correction, Document, Table
from benchmarks.remote_kv_cache.work import source_figures as figures

_BASELINE = "benchmarks.remote_kv_cache.baseline"
_HERE = "benchmarks.remote_kv_cache"
_ROUNDED = "its seconds are rounded to 10 ms, so a ratio of small ones is good to a fifth"
_ONE_RUN = Correction(
    "single figures, and ratios of two of them",
    "no trials and no spread, so a ratio near 1 may be chance. Here: three trials or more, taken "
    "in turns, their median and range, and a verdict",
)


def _by_model(rows: Mapping[str, Iterable[Cell]]) -> list[list[Cell]]:
    return [[model, *values] for model, values in rows.items()]


def _long_prefill() -> list[list[Cell]]:
    lines: list[list[Cell]] = []
    for cache, by_length in figures.LONG_PREFILL.items():
        name = {"on": "remote+prefix_caching", "off": "remote+no_prefix_caching"}[cache]
        for run in range(6):
            number = len(lines) + 1
            lines.append([f"{number}. {name}-{run + 1}", *(v[run] for v in by_length.values())])
    return lines


DOCUMENT = Document(
    "remote KV cache (wde 0.3.1)",
    "not told there; other pages of the project speak of an RTX 4090",
    [
        Table(
            f"{_BASELINE}.test_memory_io",
            "512 blocks copied",
            "s",
            ["model", "l2l naive", "b2b naive", "b2b fancy index", "b2b index_copy_",
             "b2b cython memcpy", "swap in", "swap out"],
            _by_model(figures.MEMORY_IO),
            [
                Correction(
                    "the naive copy is even faster than memcpy in Cython",
                    "a loop that copies whole blocks is a memcpy each; 1.2 to 1.8 times that is "
                    "what its Cython loop adds. Ours is compared with one flat memcpy",
                ),
                _ONE_RUN,
            ],
        ),
        Table(
            f"{_BASELINE}.test_zmq_transfer",
            "512 blocks received",
            "s, and times b2b naive",
            ["model", "b2b naive", "tcp", "ipc", "inproc", "tcp / naive", "ipc / naive",
             "inproc / naive"],
            _by_model(figures.ZMQ_TRANSFER),
            [
                Correction(
                    "a Python client needs at least two copies",
                    "true of pyzmq then; it has recv_into since 26.4, which has rows of its own "
                    "here",
                ),
            ],
        ),
        Table(
            f"{_BASELINE}.test_server",
            "512 blocks through a server, over tcp",
            "s, and times b2b naive; get / naive is corrected",
            ["model", "b2b naive", "set deferred=False", "set deferred=True", "get", "stream_get",
             "set F / naive", "set T / naive", "get / naive", "stream_get / naive"],
            [
                [model, f.naive, f.set_not_deferred, f.set_deferred, f.get, f.stream_get,
                 f.delta_set_not_deferred, f.delta_set_deferred, round(f.delta_get, 1),
                 f.delta_stream_get]
                for model, f in figures.SERVER.items()
            ],
            [
                Correction(
                    "delta-get: 3.16, 2.72, 2.15, 2.31, 3.19",
                    "the column repeats that of the deferred set. From its own seconds a get "
                    "takes 5.9, 8.0, 8.5, 7.2 and 8.3 times the naive copy, as above; " + _ROUNDED,
                ),
                Correction(
                    "two to three copies, end to end",
                    "true of the deferred set, near enough (2.15 to 3.19), and of stream_get (1.96 "
                    "to 2.61); a set that is not deferred takes 3.1 to 4.2 and a plain get 6 to 8",
                ),
                Correction(
                    "python -m benchmarks.remote_kv_cache.baseline.test_server",
                    "in its repository the file lies one folder higher; here it is where the "
                    "document says",
                ),
            ],
        ),
        Table(
            f"{_HERE}.test_transfer_out",
            "Prompts handed out, Qwen2.5-3B",
            "requests a second, one step scheduled at a time (sync) and two (async)",
            ["engine cache", "scheduling", "tokens a step", "swap_out", "transfer_out", "Delta"],
            [
                [cache, scheduling, tokens, f.swap_out, f.transfer_out, round(f.delta, 2)]
                for (cache, scheduling, tokens), f in figures.TRANSFER_OUT.items()
            ],
            [
                Correction(
                    "ratios of 0.94 to 1.02, \"almost no overhead\"",
                    "against its CPU pool, and of one run each: at 32 tokens it calls 0.28 to 0.29 "
                    "a 1.00 and 0.29 to 0.29 a 0.99. The ratios above are computed from its rates. "
                    "Ours are against an engine without a connector as well, with their interval, "
                    "beside a second engine without one",
                ),
            ],
        ),
        Table(
            f"{_HERE}.test_transfer_in",
            "Prompts got from the server at a hit rate of 0 %, Qwen2.5-3B",
            "requests a second",
            ["first pass", "second pass"],
            [["20", "50 to 60"]],
            [
                Correction(
                    "figures 1 and 2",
                    "they are pictures on another site, without numbers: these two are all that "
                    "the text has. Here a table, a CSV and plots hold every point",
                ),
            ],
        ),
        Table(
            f"{_HERE}.test_long_prefill",
            "Prompts of 10,240 tokens, Qwen2.5-7B, by length of the answers",
            "requests a second",
            ["run", *map(str, figures.LONG_PREFILL["on"])],
            _long_prefill(),
            [
                Correction(
                    "remote+no_prefix_caching-1-1",
                    "it means run 7 of its table, which is called remote+no_prefix_caching-1 there",
                ),
                _ONE_RUN,
            ],
        ),
        Table(
            f"{_HERE}.test_swap",
            "8,192 tokens (the page \"offloading KV cache\" that it continues)",
            "s",
            ["", "fastest", "slowest"],
            [["computing", 0.40, 3.69], ["swapping, each way", 0.06, 0.21]],
        ),
    ],
)  # fmt: skip
