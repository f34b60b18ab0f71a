"""Traces are read in every format for what they are, and a wrong line is counted or refused."""

import gzip
import json
import os
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from trace_lines import BURST_NAMES, bailian, burst, mooncake, recorded, recording, write

from remote_server.traces import Request, TraceError, burstgpt, check_tree, read

GOOD = mooncake(0, 1024, [1, 2])


def texts(trace):
    return [str(problem) for problem in trace.problems]


# ── each format ──────────────────────────────────────────────────────────────────────────


def test_mooncake_has_blocks_of_512_tokens_and_times_in_ms(tmp_path):
    lines = [mooncake(5000, 1100, [1, 2, 3], 50), mooncake(7000, 1600, [1, 2, 4, 5], 60)]
    trace = read(write(tmp_path / "t", lines))
    assert (trace.format, trace.block_tokens, texts(trace)) == ("Mooncake", 512, [])
    assert trace.requests == (Request(0.0, 1100, 50, (1, 2)), Request(2.0, 1600, 60, (1, 2, 4)))
    partial = read(tmp_path / "t", partial_blocks=True)
    assert [one.blocks for one in partial.requests] == [(1, 2, 3), (1, 2, 4, 5)]
    assert len(read(tmp_path / "t", limit=1).requests) == 1


def test_the_counts_of_ids_show_blocks_of_another_size(tmp_path):
    lines = [mooncake(0, 10, [0]), mooncake(0, 33, [1, 2, 3]), mooncake(0, 16, [4])]
    trace = read(write(tmp_path / "t", lines))
    assert trace.block_tokens == 16
    assert [one.blocks for one in trace.requests] == [(), (1, 2), (4,)]
    assert "blocks of 16 tokens" in trace.assumptions[0]


def test_bailian_has_blocks_of_16_tokens_and_times_in_seconds(tmp_path):
    lines = [bailian(60.5, 40, [7, 8, 9]), bailian(61.114, 48, [7, 8, 10])]
    trace = read(write(tmp_path / "t", lines))
    assert (trace.format, trace.block_tokens, texts(trace)) == ("Qwen-Bailian", 16, [])
    first, second = trace.requests
    assert len(first.blocks) == 2 and first.blocks == second.blocks[:2]
    assert second.arrival_s == pytest.approx(0.614)


def test_an_id_of_bailian_behind_other_blocks_is_another_block(tmp_path):
    trace = read(write(tmp_path / "t", [bailian(0, 32, [7, 8]), bailian(1, 48, [9, 8, 7])]))
    check_tree(trace.requests)
    first, second = trace.requests
    assert not {*first.blocks} & {*second.blocks}
    assert texts(trace) == [
        "1 line: ids that follow other blocks than before, taken as different blocks "
        "(the first: line 2)"
    ]


def test_a_recording_has_puts_namespaces_and_what_the_server_found(tmp_path):
    lines = recording(
        recorded(1000, [0, 1, 2], found=0),
        recorded(1500, [3], "put", found=0),
        recorded(2000, [0, 1, 2, 3], found=4),
        recorded(2500, [0, 1], namespace=1),
        recorded(2600, [2, 3], input_length=64, found=2),
    )
    trace = read(write(tmp_path / "t", lines))
    assert (trace.format, trace.block_tokens, trace.block_bytes) == ("kvferry", 16, 262144)
    assert trace.recorded_found == 6 and trace.starts_anywhere
    first, answer, again, other, inside = trace.requests
    assert answer.is_put and [one.is_put for one in trace.requests].count(True) == 1
    assert again.blocks == first.blocks + answer.blocks
    assert not {*other.blocks} & {*again.blocks}
    assert inside.blocks == again.blocks[2:]
    assert texts(trace) == [
        "1 line: hash_ids begin in the middle of the prompt (the first: line 6)"
    ]


def test_a_session_of_burstgpt_grows_and_its_rows_without_prefixes_are_counted(tmp_path):
    lines = burst(
        (19440110.0, "a", 40, 30),
        (19440115.0, "b", 100, 0),
        (19440120.0, "a", 90, 10),
        (19440130.0, "", 500, 5),
        (19440140.0, "a", 99, 1),
        (19440150.0, "c", 64, 1),
    )
    trace = read(write(tmp_path / "t", lines))
    first, second, third, _ = trace.requests
    assert (trace.format, trace.block_tokens, second.arrival_s) == ("BurstGPT", 16, 10.0)
    assert [len(one.blocks) for one in trace.requests] == [2, 5, 6, 4]
    assert first.blocks == second.blocks[:2]
    assert not {*third.blocks} & {*second.blocks}
    check_tree(trace.requests)
    assert trace.problems == (
        (1, 3, "no response tokens, so it failed: left out"),
        (1, 5, "no session, so nothing is known of its prefix: left out"),
        (1, 6, "a prompt shorter than its session so far: it begins a new text"),
    )
    assert "next prompt begins with its prompt before and the answer" in trace.assumptions[0]


# ── what changes nothing, and what is counted ────────────────────────────────────────────


@pytest.mark.parametrize("begin", [b"\xef\xbb\xbf", b"", b"\n\n"], ids=["BOM", "none", "blank"])
@pytest.mark.parametrize("end", [b"\r\n", b"\n"], ids=["CRLF", "LF"])
@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gzip", "plain"])
@pytest.mark.parametrize(
    "lines",
    [[GOOD] * 3, recording(recorded(0, [1])), burst((1.0, "a", 40, 3))],
    ids=["json", "recording", "csv"],
)
def test_the_marks_of_an_editor_and_gzip_change_nothing(tmp_path, begin, end, pack, lines):
    plain = write(tmp_path / "plain", lines)
    edited = tmp_path / "edited"
    edited.write_bytes(pack(begin + plain.read_bytes().replace(b"\n", end)))
    assert read(edited) == read(plain)


def test_lines_that_run_backwards_in_time_are_put_in_order_and_counted(tmp_path):
    lines = [mooncake(at, 512, [at]) for at in (1000, 3000, 2000, 0, 4000)]
    trace = read(write(tmp_path / "t", lines))
    assert [one.arrival_s for one in trace.requests] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [one.blocks for one in trace.requests] == [(0,), (1000,), (2000,), (3000,), (4000,)]
    assert texts(trace) == [
        "2 lines: earlier than the line before, sorted by time (the first: line 3)"
    ]


ACCEPTED = {
    "a partial block without an id": (
        [GOOD, mooncake(0, 600, [1, 7]), mooncake(0, 600, [1])],
        "1 line: hash_ids has no id for the last, partial block (the first: line 3)",
    ),
    "a recording without its last line": (
        recording(recorded(0, [1]))[:-1],
        "1 line: the recording has no last line: it did not end in order (the first: line 2)",
    ),
    "requests that the recording lost": (
        recording(recorded(0, [1]), lost=7),
        "1 line: 7 requests were lost while recording (the first: line 3)",
    ),
    "a recording that lacks lines": (
        [*recording(recorded(0, [1]))[:-1], '{"end": true, "requests": 3, "lost": 0}'],
        "1 line: the recording counts 3 requests, 1 are there (the first: line 3)",
    ),
}


@pytest.mark.parametrize(("lines", "says"), ACCEPTED.values(), ids=ACCEPTED)
def test_a_line_whose_meaning_is_clear_is_counted(tmp_path, lines, says):
    trace = read(write(tmp_path / "t", lines))
    assert texts(trace) == [says]
    assert trace.requests[-1].blocks


def test_a_recording_whose_server_was_killed_ends_at_its_cut_line(tmp_path):
    whole = "\n".join(recording(recorded(0, [1]), recorded(5, [1, 2]))[:-1])
    (tmp_path / "t").write_text(whole[:-9])
    trace = read(tmp_path / "t")
    assert len(trace.requests) == 1
    assert texts(trace) == [
        "1 line: the line is cut: the recording did not end in order (the first: line 3)"
    ]


# ── what is refused, by its line ─────────────────────────────────────────────────────────


def with_field(name, value):
    """The good line with `value`, as it stands in the file."""
    fields = json.loads(GOOD) | {name: "HERE"}
    return json.dumps(fields).replace('"HERE"', value)


ROW = '1.5,a,3,GPT-4,40,{},43,"Conversation log'
NO_PREFIXES = (
    "which prompts begin alike is not in {}. Take a trace with hash_ids, as Mooncake's or "
    "Qwen-Bailian's, or a recording of your own server"
)

REFUSED = {
    "no JSON": ([GOOD, "{"], "line 2: no JSON: Input data was truncated"),
    "a list": ([GOOD, "[1]"], "line 2: no JSON object"),
    "a number": ([GOOD, "17"], "line 2: no JSON object"),
    "NaN": ([GOOD, with_field("timestamp", "NaN")], "line 2: no JSON: JSON is malformed"),
    "a nested list": (
        [GOOD, '{"x": ' + "[" * 100_000],
        "line 2: no JSON: nested too deeply",
    ),
    "no field": (
        [GOOD, '{"timestamp": 0, "input_length": 9}'],
        "line 2: there is no output_length",
    ),
    "a text": (
        [GOOD, with_field("input_length", '"9"')],
        "line 2: input_length has a text, not a whole number",
    ),
    "half a token": (
        [GOOD, with_field("input_length", "9.5")],
        "line 2: input_length has a number, not a whole number",
    ),
    "a text among the ids": (
        [GOOD, with_field("hash_ids", '[1, "2"]')],
        "line 2: hash_ids has a text, not a whole number",
    ),
    "ids that are no list": (
        [GOOD, with_field("hash_ids", '{"history": [1]}')],
        "line 2: hash_ids has an object, not a list of whole numbers",
    ),
    "a negative length": (
        [GOOD, with_field("output_length", "-1")],
        "line 2: -1 tokens are no length of an answer",
    ),
    "a huge length": (
        [GOOD, with_field("output_length", "99999999999")],
        "line 2: 99,999,999,999 tokens are no length of an answer",
    ),
    "a negative time": (
        [GOOD, with_field("timestamp", "-5")],
        "line 2: the time -0.005 s is no time of a trace",
    ),
    "a huge time": (
        [GOOD, with_field("timestamp", "1e300")],
        "line 2: the time 1e+297 s is no time of a trace",
    ),
    "an infinite time": (
        [GOOD, with_field("timestamp", "1e999")],
        "line 2: timestamp has a number",
    ),
    "too few ids": (
        [GOOD, mooncake(0, 1600, [7])],
        "line 2: input_length 1600 is 4 blocks of 512 tokens, hash_ids has 1",
    ),
    "too many ids": (
        [GOOD, mooncake(0, 512, [7, 8])],
        "line 2: input_length 512 is 1 blocks of 512 tokens, hash_ids has 2",
    ),
    "bailian in other blocks": (
        [bailian(0, 512, [1])],
        "line 1: input_length 512 is 32 blocks of 16 tokens, hash_ids has 1",
    ),
    "a block behind two others": (
        [GOOD, mooncake(0, 1024, [5, 2])],
        "line 2: block 2 follows 1 and also 5: equal ids must mean equal prompts up to their block",
    ),
    "a block twice": ([GOOD, mooncake(0, 1024, [1, 1])], "line 2: block 1 follows None and also 1"),
    "no ids at all": (
        ['{"timestamp": 0, "input_length": 9, "output_length": 1}'],
        "line 1: no list hash_ids: " + NO_PREFIXES.format("the file"),
    ),
    "parts of a prompt in place of ids": (
        ['{"timestamp": "0", "input_length": 9, "hash_ids": {"history": [1]}}'],
        "line 1: no list hash_ids: " + NO_PREFIXES.format("the file"),
    ),
    "a recording of a later format": (
        ['{"kvferry_trace": 2}'],
        "line 1: a recording in format 2; this kvferry reads format 1",
    ),
    "a recording of nothing": (recording(), "no requests"),
    "a recording of puts alone": (recording(recorded(0, [1], "put")), "no requests"),
    "a recording of something else": (
        recording(recorded(0, [1], "touch")),
        "line 2: the type 'touch' is neither lookup nor put",
    ),
    "a recording with other blocks": (
        recording(recorded(0, [1]), recorded(0, [1], namespace=1, block_size=32, input_length=32)),
        "line 3: blocks of 32 tokens and 262,144 bytes, those before have 16 and 262,144: keep the "
        "first line and the lines of one namespace and group",
    ),
    "a recording with a block twice": (
        recording(recorded(0, [1, 2, 1])),
        "line 2: block 0 comes 2 times in a prompt: equal ids must mean equal prompts",
    ),
    "a recording with blocks of nothing": (
        recording(recorded(0, [1], block_size=0)),
        "line 2: block_size and block_bytes are at least 1",
    ),
    "a recording that found too much": (
        recording(recorded(0, [1], found=2)),
        "line 2: found 2 of 1 blocks",
    ),
    "a recording with too many ids": (
        recording(recorded(0, [1, 2], input_length=16)),
        "line 2: input_length 16 is 1 blocks of 16 tokens, hash_ids has 2",
    ),
    "a recording that goes on": (
        [*recording(recorded(0, [1])), recorded(0, [1])],
        "line 4: a line after the last one of the recording",
    ),
    "a wrong last line": (
        [*recording(recorded(0, [1]))[:-1], '{"end": true}'],
        "line 3: there is no requests",
    ),
    "Azure": (
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46,374,44"],
        "Azure's LLM inference traces have times and lengths only: " + NO_PREFIXES.format("them"),
    ),
    "Azure with images": (
        ["TIMESTAMP,NumImages,ContextTokens,GeneratedTokens"],
        "Azure's LLM inference traces have times and lengths only",
    ),
    "BurstGPT's first release": (
        ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,a,9,1,10,b"],
        "BurstGPT without the column 'Session ID' has times and lengths only: which prompts begin "
        "alike is not in it. Take BurstGPT's second release, BurstGPT_3.csv.",
    ),
    "BurstGPT without a column": (
        ["Session ID,Model,Request tokens,Response tokens", "a,b,9,1"],
        "BurstGPT without the column 'Timestamp'",
    ),
    "BurstGPT of an API alone": (
        burst((1.0, "", 40, 3)),
        "no row with a session and response tokens",
    ),
    "BurstGPT with half a token": (
        [BURST_NAMES, "1,a,3,GPT-4,40.5,3,43,b"],
        "line 2: Request tokens is '40.5', not a whole number",
    ),
    "BurstGPT with a negative length": (
        [BURST_NAMES, "1,a,3,GPT-4,-40,3,43,b"],
        "line 2: Request tokens is '-40', not a whole number",
    ),
    "BurstGPT with a huge length": (
        [BURST_NAMES, "1,a,3,GPT-4,1e30,3,43,b"],
        "line 2: 1,000,000,000,000,000,019,884,624,838,656 tokens are no length of a prompt",
    ),
    "BurstGPT at no time": (
        [BURST_NAMES, "nan,a,3,GPT-4,40,3,43,b"],
        "line 2: Timestamp is 'nan', not seconds",
    ),
    "BurstGPT with a short row": ([BURST_NAMES, "1,a,3"], "line 2: 3 values for 8 columns"),
    "BurstGPT with an open quote": (
        [BURST_NAMES, ROW.format(3)],
        "line 2: no CSV: unexpected end of data",
    ),
    "another table": (["a,b,c", "1,2,3"], "line 1: no known format: 'a,b,c'. Known are JSON lines"),
    "prose": (["Dear reader"], "line 1: no known format: 'Dear reader'"),
    "a pointer": (
        ["version https://git-lfs.github.com/spec/v1", "oid sha256:3d74"],
        "a pointer of Git LFS: fetch the file with `git lfs pull`",
    ),
    "nothing": ([""], "no requests: the file is empty"),
}


@pytest.mark.parametrize(("lines", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path, lines, says):
    path = write(tmp_path / "t", lines)
    with pytest.raises(TraceError) as refused:
        read(path)
    message = str(refused.value)
    assert message.startswith(f"{path}") and says in message
    assert "\n" not in message and len(message) < len(f"{path}") + 300


WHOLE = "\n".join(mooncake(number, 512, [number]) for number in range(9000)).encode() + b"\n"
PACKED = gzip.compress(WHOLE)
DAMAGED = PACKED[:20_000] + b"\xff" * 64 + PACKED[20_064:]
WRONG_SUM = PACKED[:-8] + bytes(8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            PACKED[: len(PACKED) // 2],
            r"the gzip archive is cut after line [\d,]+: .*zcat .* head -n",
        ),
        (DAMAGED, r"the gzip archive is damaged after line [\d,]+ "),
        (WRONG_SUM, r"the gzip archive is damaged after line 9,000 \(CRC check failed"),
        (b"\x1f\x8b", "the gzip archive is cut after line 0"),
        (b"PAR1\x80\x81\xff", "no UTF-8 text after line 0; a trace is JSON lines or CSV"),
        (GOOD.encode() + b"\n\xff\xfe", "no UTF-8 text after line 0"),
        (b"", "the file is empty"),
        (None, "No such file or directory"),
    ],
    ids=["cut", "damaged", "sum", "short", "binary", "latin", "empty", "missing"],
)
def test_a_file_that_cannot_be_read_to_its_end_is_refused(tmp_path, content, says):
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=says):
        read(path)
    assert path.exists() or content is None


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(TraceError, match="Is a directory"):
        read(tmp_path)


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("remote_server.traces.text.MAX_LINE", 1000)
    with pytest.raises(TraceError, match="line 2 is longer"):
        read(write(tmp_path / "t", [GOOD, "1" * 5000]))


def test_larger_blocks_are_the_same_prompts(tmp_path):
    lines = [
        bailian(0, 5 * 16 + 3, [1, 2, 3, 4, 5, 6]),
        bailian(0, 8 * 16, [1, 2, 3, 4, 9, 8, 7, 6]),
    ]
    trace = read(write(tmp_path / "t", lines), partial_blocks=True)
    larger = trace.in_blocks_of(64)
    assert larger.block_tokens == 64
    first, second = (one.blocks for one in larger.requests)
    assert len(first) == 1 and len(second) == 2 and first == second[:1]
    assert trace.in_blocks_of(16) is trace
    with pytest.raises(TraceError, match="blocks of 16 tokens are not blocks of 40"):
        trace.in_blocks_of(40)


DAMAGED_FILES = [
    [mooncake(1000 * n, 1024, [1, 2 + n]) for n in range(6)],
    [bailian(n, 40, [1, 2 + n, 9]) for n in range(6)],
    recording(*(recorded(n, [1, 2 + n]) for n in range(6))),
    burst(*((float(n), "a", 40 * n + 40, 3) for n in range(6))),
]


@pytest.mark.parametrize("lines", DAMAGED_FILES, ids=["mooncake", "bailian", "kvferry", "burst"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_damaged_bytes_are_a_trace_or_refused_and_nothing_else(tmp_path, lines, pack):
    chance = random.Random(len(lines[0]))
    path = tmp_path / "t"
    whole = pack("\n".join([*lines, ""]).encode())
    refused = []
    for _ in range(300):
        damaged = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.choice([0, 1, 3])):
            if damaged:
                damaged[chance.randrange(len(damaged))] = chance.choice(b'"[]{},-.09eN\0\n\xff')
        path.write_bytes(damaged)
        try:
            trace = read(path)
        except TraceError as error:
            refused.append(str(error))
        else:
            assert trace.requests[0].arrival_s == 0
            assert len(trace.in_blocks_of(2048).requests) == len(trace.requests)
    assert 20 < len(refused) < 300
    assert all(message.startswith(f"{path}") for message in refused)


def test_a_trace_comes_through_a_pipe(tmp_path):
    content = "\n".join([mooncake(0, 1024, [1, 2]), mooncake(5, 1024, [1, 3]), ""]).encode()
    for pack in (bytes, gzip.compress):
        pipe = tmp_path / pack.__name__
        os.mkfifo(pipe)
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(pipe.write_bytes, pack(content))
            assert len(read(pipe).requests) == 2
            written.result(30)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, "a", (1 << 31) - 1, 5)],
        [(at, f"s{at}", 20_000_000, 5) for at in range(40)],
        [(at, "a", 16 * 40_000 * (at + 1), 5) for at in range(200)],
    ],
    ids=["one", "many", "growing"],
)
def test_short_rows_of_more_blocks_than_memory_are_refused(tmp_path, monkeypatch, rows):
    """A row names a length, and each of its blocks takes memory."""
    monkeypatch.setattr(burstgpt, "MOST_BLOCKS", 1 << 18)
    monkeypatch.setattr(burstgpt, "MOST_DIFFERENT", 1 << 17)
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(burst(*rows)))
    tracemalloc.start()
    with pytest.raises(TraceError, match="too many to hold in memory"):
        read(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
