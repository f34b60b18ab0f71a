"""What other sizes would find, and why tokens were not found, in words for an operator."""

from contextlib import closing

import msgspec
import pytest
from client_helpers import PatientClient, key

from remote_server.cli.__main__ import main
from remote_server.cli.figures.sums import sum_of
from remote_server.cli.figures.what_if_lines import miss_lines, what_if_lines, why_lines
from remote_server.client import ClientConfig
from remote_server.protocol import EngineState, FoundAt, StatsReply, Stretch, WhatIf
from remote_server.protocol.what_if_words import (
    LEAST_TOKENS,
    enough_bytes,
    reason_lines,
    sentences,
    sound,
    speed_of,
)
from remote_server.values import GiB

TIMES = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
SHARES = [0.1, 0.15, 0.2, 0.29, 0.35, 0.41, 0.414]
MISSED = {"never_seen": 0.6, "evicted_60": 0.05, "evicted_3600": 0.03, "declined": 0.03}


def found(shares: list[float], asked: int = 10 * LEAST_TOKENS, **missed: float) -> FoundAt:
    return FoundAt(
        asked=asked,
        found={"memory": int(shares[3] * asked)},
        rule={"memory": shares},
        lru={"memory": shares},
        missed=missed,
    )


def what_if(total: FoundAt, seen: int = 10_000 * GiB, **namespaces: FoundAt) -> WhatIf:
    return WhatIf(
        over_s=86_400.0, times=TIMES, budgets={"memory": 32 * GiB}, rule="learned",
        seen_bytes=seen, model_bytes=1, total=total, namespaces=namespaces,
    )  # fmt: skip


def reply(one: WhatIf | None, *engines: EngineState) -> StatsReply:
    return StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=1.0, tiers={}, namespaces={}, counters={},
        what_if=one, engines=[*engines],
    )  # fmt: skip


def engine(speed: float) -> EngineState:
    return EngineState(
        namespace="n", client="c", model="m", software="s", prompt_tokens=1, reused={},
        tokens_per_s=speed, given_up=7,
    )  # fmt: skip


def test_the_sentence_names_what_more_brings_and_where_it_ends():
    first, *others = sentences(what_if(found(SHARES)), "memory", 1000.0)
    assert first == (
        "With 96.0 GiB more memory, 41 % of the prompt tokens that engines look up would be found; "
        "today 29 % are. Beyond 119.4 GiB in all, more brings less than 1 %."
    )
    assert others == [
        "That saves 2 min of computing a day, at the 1,000 tokens a second that engines compute.",
        "Half of today's memory would find 20 %.",
    ]


def test_where_more_brings_nothing_the_sentence_says_so():
    flat = [0.1, 0.2, 0.28, 0.29, 0.291, 0.292, 0.292]
    first, second = sentences(what_if(found(flat)), "memory")
    assert first == (
        "Of the prompt tokens that engines look up, 29 % are found today, and more memory would "
        "not change that by 1 %."
    )
    assert second == "Half of today's memory would find 28 %."


def test_where_more_always_finds_more_no_end_is_named():
    rising = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert (
        "Up to 256.0 GiB in all, more finds more." in sentences(what_if(found(rising)), "memory")[0]
    )


def test_of_several_tiers_the_sentence_names_where_tokens_are_found():
    one = found(SHARES)
    both = msgspec.structs.replace(
        one, rule={"memory": SHARES, "disk": SHARES}, lru={"memory": SHARES, "disk": SHARES}
    )
    two = msgspec.structs.replace(what_if(both), budgets={"memory": 32 * GiB, "disk": 64 * GiB})
    assert "would be found in memory; today 29 % are." in sentences(two, "memory")[0]
    assert sentences(two, "disk")[0].startswith("With 192.0 GiB more disk, 41 %")
    assert "would be found in memory or on disk; today" in sentences(two, "disk")[0]


def test_few_tokens_allow_no_conclusion():
    few = found(SHARES, asked=LEAST_TOKENS - 1)
    assert sentences(what_if(few), "memory") == [
        "So far engines looked up 99,999 tokens: too few to conclude from."
    ]


def test_requests_that_do_not_fill_the_largest_size_yet_are_named():
    last = sentences(what_if(found(SHARES), seen=40 * GiB), "memory")[-1]
    assert last == (
        "The requests so far were for 40.0 GiB of different blocks: a longer time may show that "
        "more is of use."
    )


def test_the_size_that_is_enough_is_between_the_known_ones():
    assert enough_bytes(TIMES, [0.5] * 7, 8.0) == 1.0
    assert enough_bytes(TIMES, [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9], 8.0) == pytest.approx(
        64.0, rel=0.02
    )
    assert 16.0 < enough_bytes(TIMES, [0.1, 0.1, 0.1, 0.1, 0.3, 0.49, 0.5], 8.0) <= 32.0


def test_reasons_and_the_found_share_are_one_hundred_percent():
    lines = reason_lines(found(SHARES, **MISSED))
    assert lines == [
        " 60.0 %  never seen before",
        "  8.0 %  evicted: 5.0 % less than a minute before, 8.0 % less than an hour before",
        "  3.0 %  put declined",
    ]
    assert sum(float(line.split("%")[0]) for line in lines) + 29.0 == pytest.approx(100.0)


def test_lines_of_stats_say_what_was_found_and_what_came_too_late():
    lines = miss_lines(reply(what_if(found(SHARES, **MISSED)), engine(1.0)))
    assert lines[0].split()[1] == "1,000,000" and "29.0 %  found" in lines[1]
    assert lines[-1].endswith("engines computed 7 blocks that came too late")
    assert miss_lines(reply(None)) == []


def test_the_table_has_every_size_and_marks_todays():
    lines = what_if_lines(reply(what_if(found(SHARES), a=found(SHARES), b=found(SHARES))))
    today = next(line for line in lines if line.endswith("today"))
    assert today.split() == ["32.0", "GiB", "29.0", "%", "29.0", "%", "today"]
    assert lines[-1].split() == ["b", "1,000,000", "20.0", "%", "29.0", "%", "35.0", "%",
                                 "41.4", "%"]  # fmt: skip
    assert max(map(len, lines)) <= 200


def test_why_names_the_reasons_of_the_chosen_namespaces():
    one = what_if(found(SHARES), a=found(SHARES, **MISSED), b=found(SHARES, **MISSED))
    lines = why_lines(reply(one), ["a"])
    assert lines[1] == "a: of 1,000,000 tokens looked up 29.0 % were found"
    assert not any(line.startswith("b:") for line in lines)


def test_a_curve_that_does_not_fit_itself_is_no_curve():
    good = what_if(found(SHARES))
    assert sound(good) is good and sound(None) is None
    short = msgspec.structs.replace(good, total=found([*SHARES[:3], 0.3]))
    for wrong in (
        msgspec.structs.replace(good, times=[]),
        msgspec.structs.replace(good, budgets={"disk": 1}),
        msgspec.structs.replace(good, namespaces={"a": short.total}),
        short,
    ):
        assert sound(wrong) is None
        assert what_if_lines(reply(wrong))[0].startswith("no server that answered has a curve")
        assert miss_lines(reply(wrong)) == why_lines(reply(wrong), ["a"]) == []


def test_of_several_servers_each_counts_as_often_as_it_was_asked():
    half = [share / 2 for share in SHARES]
    total = sum_of(
        {
            "a": reply(what_if(found(SHARES, never_seen=0.71))),
            "b": reply(what_if(found(half, 30 * LEAST_TOKENS, never_seen=0.5, late=0.355))),
            "old": reply(None),
        }
    ).what_if
    assert total is not None and total.budgets == {"memory": 64 * GiB}
    assert total.total.asked == 40 * LEAST_TOKENS
    assert total.total.rule["memory"] == pytest.approx([0.625 * share for share in SHARES])
    assert sum(total.total.missed.values()) + 0.625 * 0.29 == pytest.approx(1.0)


def test_the_speed_is_the_mean_of_engines_that_have_measured_it():
    assert speed_of([engine(0.0)]) == 0.0
    assert speed_of([engine(0.0), engine(100.0), engine(300.0)]) == 200.0


def test_a_server_shows_its_requests_to_the_command(server, capsys):
    with closing(PatientClient(ClientConfig(server.endpoint, quiet=True))) as client:
        client.declare("ns", 4096, {"model": "m"})
        while not client.ready:
            pass
        rows = [memoryview(bytes(4096))] * 64
        for number in range(40):
            keys = [key(64 * (number % 20) + at) for at in range(64)]
            chain = [Stretch(64, 0, 0, 512)]
            there = client.lookup("ns", keys, chain=chain).result(60).prefix
            if there < 64:
                rest = [Stretch(64 - there, 0, 512 * there, 512)]
                client.put("ns", keys[there:], rows[there:], chain=rest, deferred=False).result(60)
    arguments = ["--server", server.endpoint, "--timeout-s", "60"]
    assert main(["stats", "--what-if", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1,310,720 tokens looked up in the last ")
    assert "memory" in out and "today" in out
    assert main(["stats", *arguments]) == 0
    assert "50.0 %  never seen before" in capsys.readouterr().out
    assert main(["why", *arguments]) == 0
    assert "ns: of 1,310,720 tokens looked up 50.0 % were found" in capsys.readouterr().out
