"""Curves with any numbers, as a lying server sends them: the commands print some lines of them."""

import math
from random import Random

import msgspec
import pytest

from remote_server.cli.figures.sums import sum_of
from remote_server.cli.figures.what_if_lines import miss_lines, what_if_lines, why_lines
from remote_server.protocol import EngineState, FoundAt, StatsReply, WhatIf
from remote_server.protocol.what_if_words import sound

ODD = [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 1e308, -1e308, 5e-324, 0.5, 1.0, 2.0]
COUNTS = [0, 1, -1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, *[200_000] * 12]
TIMES = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]


def some(chance: Random, usual: list[float]) -> list[float]:
    """`usual`, mostly with an odd number, a missing one, or in another order."""
    made = [*usual]
    kind = chance.randrange(30)
    if kind == 0:
        made[chance.randrange(len(made))] = chance.choice(ODD)
    if kind == 1:
        made.pop(chance.randrange(len(made)))
    if kind == 2:
        chance.shuffle(made)
    return made


def found(chance: Random, tiers: list[str]) -> FoundAt:
    return FoundAt(
        asked=chance.choice(COUNTS), found={tier: chance.choice(COUNTS) for tier in tiers},
        rule={tier: some(chance, SHARES) for tier in tiers},
        lru={tier: some(chance, SHARES) for tier in tiers},
        missed=dict(zip(("late", "evicted_60"), some(chance, [0.1, 0.2]), strict=False)),
    )  # fmt: skip


def one(chance: Random) -> WhatIf:
    tiers = chance.choice([[], ["memory"], ["memory", "disk"], ["x"]])
    return WhatIf(
        over_s=chance.choice([*ODD, *[100.0] * 20]),
        times=some(chance, TIMES),
        budgets={tier: chance.choice(COUNTS) for tier in tiers},
        rule=chance.choice(["lru", "learned", ""]),
        seen_bytes=chance.choice(COUNTS), model_bytes=chance.choice(COUNTS),
        total=found(chance, tiers),
        namespaces={name: found(chance, tiers) for name in "abc"[: chance.randrange(4)]},
    )  # fmt: skip


def reply(chance: Random, what_if: WhatIf) -> StatsReply:
    engine = EngineState(
        namespace="n", client="c", model="m", software="s", prompt_tokens=1, reused={},
        tokens_per_s=chance.choice(ODD), given_up=chance.choice(COUNTS),
    )  # fmt: skip
    made = StatsReply(
        request_id=1, epoch="e", server="s", uptime_s=1.0, tiers={}, namespaces={}, counters={},
        what_if=what_if, engines=[engine],
    )  # fmt: skip
    return msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=StatsReply)


def check(made: StatsReply) -> None:
    lines = [*what_if_lines(made), *miss_lines(made), *why_lines(made, ["a", "b", "c"])]
    assert not any("nan" in line or "inf" in line for line in lines), lines


@pytest.mark.parametrize("seed", range(4))
def test_any_numbers_give_lines(seed: int):
    chance = Random(seed)
    before = None
    num_sound = 0
    for _ in range(2000):
        made = reply(chance, one(chance))
        num_sound += sound(made.what_if) is not None
        check(made)
        if before is not None:
            check(sum_of({"a": before, "b": made, "c": made}))
        before = made
    assert num_sound > 50, "some of them were looked at"


@pytest.mark.parametrize("odd", ODD)
def test_one_odd_number_in_a_good_curve(odd: float):
    good = FoundAt(
        asked=200_000, found={"memory": 60_000}, rule={"memory": SHARES}, lru={"memory": SHARES},
        missed={"late": 0.7},
    )  # fmt: skip
    curve = WhatIf(
        over_s=100.0, times=TIMES, budgets={"memory": 1 << 30}, rule="learned", seen_bytes=1,
        model_bytes=1, total=good,
    )  # fmt: skip
    assert sound(curve) is curve
    for at in range(len(TIMES)):
        odd_shares = [*SHARES[:at], odd, *SHARES[at + 1 :]]
        odd_times = [*TIMES[:at], odd, *TIMES[at + 1 :]]
        total = msgspec.structs.replace(good, rule={"memory": odd_shares})
        for wrong in (
            msgspec.structs.replace(curve, total=total),
            msgspec.structs.replace(curve, times=odd_times),
            msgspec.structs.replace(curve, over_s=odd),
        ):
            check(reply(Random(at), wrong))
