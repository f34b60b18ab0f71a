"""Recorded requests: read as they are, refused with the place of what is wrong."""

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_time
import pytest
from synthetic_trace import write

from benchmarks.storage_workload.backends.backend import ReadDone
from benchmarks.storage_workload.backends.emulated import EmulatedBackend
from benchmarks.storage_workload.figures import trace_count, validation
from benchmarks.storage_workload.figures.samples import RequestSample, Samples, TransferSample
from benchmarks.storage_workload.load import arrivals
from benchmarks.storage_workload.load.driver import Driver, Pace
from benchmarks.storage_workload.plan.options import Options
from benchmarks.storage_workload.runs.run import execute
from benchmarks.storage_workload.traffic import traces
from benchmarks.storage_workload.traffic.entries import Blocks
from benchmarks.storage_workload.traffic.models import BlockShape
from benchmarks.storage_workload.traffic.traces import TraceSource
from remote_server.errors import ConfigError

BURST = """Timestamp,Session ID,Request tokens,Response tokens,Model
5,1,472,18,ChatGPT
45,2,1087,230,GPT-4
45.5,1,417,9,ChatGPT
118,3,1360,185,GPT-4
120,4,0,77,ChatGPT
"""


def burst(folder: Path, text: str = BURST) -> Path:
    file = folder / "burst.csv"
    file.write_text(text)
    return file


def sharegpt(folder: Path) -> Path:
    def said(*words: tuple[str, str]) -> dict[str, Any]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in words]}

    long, longer = "q" * 4 * 20_000, "a" * 4 * 3_000
    file = folder / "talk.json"
    file.write_text(json.dumps([
        said(("human", "q" * 400), ("gpt", "a" * 800), ("human", "q" * 80), ("gpt", "a" * 40)),
        said(("system", "be kind"), ("human", long), ("gpt", longer)),
        said(("human", "nobody answers")),
        said(("human", "hi"), ("gpt", "")),
    ]))  # fmt: skip
    return file


def mooncake(folder: Path) -> Path:
    lines = [
        {"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 3]},
        {"timestamp": 2000, "input_length": 1600, "output_length": 60, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 6000, "input_length": 600, "output_length": 70, "hash_ids": [9, 10]},
    ]
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def served(source: TraceSource, arrival: Any, seconds: float) -> Samples:
    """By a store that takes no notable time, in fake time."""

    async def run() -> Samples:
        driver = Driver(source, EmulatedBackend(1e12), BlockShape(512, 1), Pace())
        await driver.run_arrivals(arrival, seconds)
        return driver.samples

    return fake_time.run(run())


# As its authors publish it, in both releases: failures have no response tokens.
BURST_1 = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
118,GPT-4,0,77,77,API log
"""
BURST_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,\
Log Type
5.0,1098,3.5,ChatGPT,472,18,490,Conversation log
45.0,,0.0,ChatGPT,1087,230,1317,API log
118.25,1098,,GPT-4,417,0,417,Conversation log
118.5,7,1.25,GPT-4,0,77,77,API log
"""


@pytest.mark.parametrize(("text", "last_s"), [(BURST_1, 118), (BURST_2, 118.5)])
def test_both_releases_of_burstgpt_are_read_and_failed_requests_are_left_out(
    tmp_path, text, last_s
):
    file = burst(tmp_path, text)
    source = traces.read_burst(file)
    assert [(r.context_tokens, r.generation_tokens, r.arrival_s) for r in source.requests] == [
        (472, 18, 5), (1087, 230, 45), (1, 77, last_s),
    ]  # fmt: skip
    assert source.note == "1 of 4 requests of the trace had failed and are left out"
    options = Options(
        use_burst_trace=True, burst_trace_path=file, seed=1, emulated_device=1.0, duration=0.2,
        generation_mode="none", gpu_mem_gb=0,
    )  # fmt: skip
    assert source.note in execute(options).notes


def test_the_oddities_of_published_sharegpt_conversations_are_passed_over(tmp_path):
    """No id, a conversation that begins with an answer or continues one, other names and roles,
    texts that are empty or null, and questions without an answer."""

    def said(*words: tuple[str, str | None]) -> list[dict[str, str | None]]:
        return [{"from": who, "value": text} for who, text in words]

    file = tmp_path / "talk.json"
    file.write_text(json.dumps([
        {"id": "QWJhYvA_0", "conversations": said(("human", "q" * 40), ("gpt", "a" * 80))},
        {"conversations": said(("gpt", "a" * 400), ("human", "q" * 80), ("gpt", "a" * 120))},
        {"id": "x_3", "conversations": []},
        {"id": None, "conversations": said(("system", "be kind"), ("user", "q" * 44),
                                           ("tool", "t" * 900), ("chatgpt", "a" * 16))},
        {"id": "y_0", "conversations": said(("human", ""), ("gpt", None), ("gpt", "more"))},
        {"id": "y_1", "conversations": said(("human", "first"), ("human", "q" * 8), ("bing", "a"))},
        {"id": "z", "conversations": said(("human", "nobody answers"))},
    ]))  # fmt: skip
    source = traces.read_sharegpt(file, 500)
    assert [(r.user, r.new.tokens, r.generation_tokens) for r in source.requests] == [
        (0, 10, 20), (1, 20, 30), (2, 11, 4), (3, 1, 1), (4, 2, 1)
    ]  # fmt: skip
    assert source.note == ""


def test_each_conversation_of_sharegpt_keeps_its_order_and_begins_with_what_was_asked(tmp_path):
    source = traces.read_sharegpt(sharegpt(tmp_path), 500)
    first, second, third = (
        [request for request in source.requests if request.user == user] for user in range(3)
    )
    assert list(source.requests_of(0)) == [*first, *second, *third], "one after another"
    assert list(source.requests_of(1)) == [], "nobody else has them too"
    assert [(r.new.tokens, r.generation_tokens, r.turn) for r in first] == [
        (100, 200, 1),
        (20, 10, 2),
    ]
    assert first[1].prefix == (first[0].new,)
    keys = [key for r in source.requests for key in r.new.blocks(BlockShape(16, 1)).keys]
    assert len(keys) == len(set(keys)), "no two turns share a block"
    assert [(r.new.tokens, r.generation_tokens) for r in second] == [(16_384, 2_048)], "at most"
    assert [(r.new.tokens, r.generation_tokens) for r in third] == [(1, 1)], "at least"
    assert [r.arrival_s for r in source.requests] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert [(r.user, r.turn) for r in source.requests] == [(0, 1), (1, 1), (2, 1), (0, 2)]


def test_a_mooncake_prompt_finds_the_blocks_that_it_shares_with_an_earlier_one(tmp_path):
    source = traces.read_mooncake(mooncake(tmp_path))
    samples = served(source, arrivals.as_recorded(source.requests, 1), 10)
    assert [(r.history_asked, r.history_hit) for r in samples.requests] == [(2, 0), (3, 2), (1, 0)]
    assert [r.context_tokens for r in samples.requests] == [1100, 1600, 600]


@pytest.mark.parametrize("speed", [0.5, 4])
def test_a_trace_comes_as_many_times_as_fast_as_asked_for_from_its_first_request_on(
    tmp_path, speed
):
    for source, times in (
        (traces.read_burst(burst(tmp_path)), [0, 40, 40.5, 113, 115]),
        (traces.read_sharegpt(sharegpt(tmp_path), 500), [0, 0.1, 0.2, 0.3]),
        (traces.read_mooncake(mooncake(tmp_path)), [0, 2, 6]),
    ):
        samples = served(source, arrivals.as_recorded(source.requests, speed), 1000)
        arrived = sorted(request.arrived_s for request in samples.requests)
        assert arrived == pytest.approx([time / speed for time in times], abs=1e-5)


READERS: dict[str, Callable[[Path], object]] = {
    "burst_trace_path": traces.read_burst,
    "dataset_path": lambda path: traces.read_sharegpt(path, 500),
    "mooncake_trace": traces.read_mooncake,
    "validation_trace": validation.read,
}
"""By their options."""


@pytest.mark.parametrize("option", READERS)
def test_a_file_that_is_not_there_is_named_with_its_option(tmp_path, option):
    with pytest.raises(ConfigError, match=f"^{option}: .*gone.*No such file"):
        READERS[option](tmp_path / "gone")


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("burst_trace_path", "Timestamp,Request tokens\n1,2\n",
         "trace, line 2: there is no column 'Response tok"),
        ("burst_trace_path", BURST + "9,1,many,3,x\n",
         "trace, line 7: Request tokens is 'many', not a whole"),
        ("burst_trace_path", BURST + "nan,1,5,3,x\n",
         "trace, line 7: Timestamp is 'nan', not seconds"),
        ("burst_trace_path", "", "trace has no requests"),
        ("dataset_path", "[", "trace: Expecting value: line 1 column 2"),
        ("dataset_path", '[{"conversations": []}, {"id": 1}]', "trace, conversation 2 is not"),
        ("dataset_path", '[{"conversations": [{"from": "human", "value": 3},'
         ' {"from": "gpt", "value": ""}]}]', "trace, conversation 1 is not"),
        ("mooncake_trace", '{"timestamp": 0, "input_length": 600, "output_length": 7,'
         ' "hash_ids": [9, 10]}\nwhat\n', "trace, line 2: "),
        ("validation_trace", '{"requests": []}', "is not a list of requests"),
        ("validation_trace", '[{"context_tokens": 3}]', "no request has cache_hit"),
        ("validation_trace", '[{"cache_hit": true}, {"cache_hit": "yes"}]',
         "request 2: cache_hit is 'yes', not a num"),
        ("validation_trace", '[{"cache_hit": 1, "read_bytes": -1}]',
         "request 1: read_bytes is -1, not a number"),
    ],
)  # fmt: skip
def test_what_is_bad_in_a_file_is_named_with_its_option_and_place(tmp_path, option, text, said):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError) as error:
        READERS[option](tmp_path / "trace")
    assert str(error.value).startswith(f"{option}: ") and said in str(error.value)


@pytest.mark.parametrize(
    ("kind", "variation"), [("fixed", 0.0), ("poisson", 1.0), ("gamma", 2**0.5)]
)
def test_arrivals_come_at_their_rate_and_as_unevenly_as_their_kind(kind, variation):
    times = list(itertools.islice(arrivals.times(kind, 20, 1), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0 and statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) * 20 == pytest.approx(variation, rel=0.05, abs=1e-9)
    again = list(itertools.islice(arrivals.times(kind, 20, 1), 20_000))
    assert times == again
    if kind != "fixed":
        assert times != list(itertools.islice(arrivals.times(kind, 20, 2), 20_000))


def recorded(folder: Path, rows: object) -> Path:
    file = folder / "recorded.json"
    file.write_text(json.dumps(rows))
    return file


def ours(num_hits: int, num_requests: int) -> Samples:
    requests = [
        RequestSample(0, 1, 0, number, "batch", "coding", "prefill", 1, 200, 50, 0.0, 0.1, 0.5,
                      0, 0, 10, 10 if number < num_hits else 9, 0, 0)
        for number in range(num_requests)
    ]  # fmt: skip
    moved = [
        TransferSample(0.5, 0, number, "reuse", "read", "disk", 1, 3000, 0.002 * (number + 1), 0, 0)
        for number in range(num_requests)
    ]
    return Samples(requests, moved, [], 2.0)


@pytest.mark.parametrize(
    ("num_hits", "off", "is_near"), [(21, 5.0, True), (22, 10.0, False), (18, -10.0, False)]
)
def test_a_run_says_by_how_much_its_hit_rate_is_off_and_passes_within_five_percent(
    tmp_path, num_hits, off, is_near
):
    rows = [{"cache_hit": number < 20, "context_tokens": 100, "read_latency_ms": 10}
            for number in range(40)]  # fmt: skip
    found = validation.compare(validation.read(recorded(tmp_path, rows)), ours(num_hits, 40))
    assert found["passed"] is is_near
    assert found["says"] == f"the hit rate is off by {off:+.1f}%, 5% are allowed"
    by_name = {row["name"]: row for row in found["rows"]}
    assert by_name.keys() == {"hit rate", "context tokens, mean", "read latency, P95 ms"}
    assert by_name["hit rate"]["trace"] == 0.5 and by_name["hit rate"]["here"] == num_hits / 40
    assert by_name["context tokens, mean"]["off_percent"] == pytest.approx(100.0)
    assert by_name["read latency, P95 ms"]["here"] == pytest.approx(76.0)
    assert by_name["read latency, P95 ms"]["off_percent"] == pytest.approx(660.0)


def test_a_run_without_an_answer_agrees_with_no_trace(tmp_path):
    rows = validation.read(recorded(tmp_path, [{"cache_hit": True}]))
    found = validation.compare(rows, Samples())
    assert not found["passed"] and found["rows"] == []
    assert "no request was answered here" in found["says"]


class Forgetful(EmulatedBackend):
    """Never finds more than one block."""

    async def read(self, blocks: Blocks) -> ReadDone:
        return await super().read(blocks.part(0, 1))


@pytest.mark.parametrize("store", [EmulatedBackend, Forgetful])
def test_one_user_after_another_finds_what_the_count_finds_and_a_store_that_forgets_less(
    tmp_path, store
):
    source = traces.read_mooncake(write(tmp_path / "trace.jsonl", 200))
    shape = BlockShape(traces.MOONCAKE_BLOCK_TOKENS, 16)

    async def run() -> list[RequestSample]:
        driver = Driver(source, store(1e9), shape, Pace())
        await driver.run_users(1, 1e6)
        return driver.samples.requests

    beside = trace_count.beside(source.requests, fake_time.run(run()))
    assert beside is not None and beside["requests"] == 200
    assert 0.2 < beside["findable"] < 0.9
    assert beside["off_points"] < -10 if store is Forgetful else beside["off_points"] == 0
