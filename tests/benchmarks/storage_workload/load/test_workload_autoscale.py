"""The autoscalers: what they decide, as tables; and what they find, on devices of known speed."""

import asyncio
import itertools

import fake_time
import pytest

from benchmarks.storage_workload.backends.emulated import EmulatedBackend
from benchmarks.storage_workload.load import autoscale
from benchmarks.storage_workload.load.autoscale import (
    CONFIRMING,
    CapacityState,
    QosState,
    decide_capacity,
    decide_qos,
    most_users,
)
from benchmarks.storage_workload.load.driver import Driver, Pace
from benchmarks.storage_workload.load.scaling import Scaling
from benchmarks.storage_workload.traffic.models import MODELS, shape_of
from benchmarks.storage_workload.traffic.requests import Workload


def look(state: QosState, *saturations: float) -> tuple[QosState, list[int]]:
    """The users that each look leaves."""
    users = []
    for saturation in saturations:
        state, decision = decide_qos(state, saturation, 0.8)
        users.append(decision.users)
    return state, users


def test_too_slow_twice_takes_a_fifth_away_and_then_three_looks_are_left_out():
    state, users = look(QosState(100), 0.95, 0.95)
    assert users == [100, 80] and state.cooldown == 3
    state, users = look(state, 9.0, 9.0, 9.0)
    assert users == [80, 80, 80] and state.cooldown == 0 and state.strikes == 0


@pytest.mark.parametrize(
    ("state", "saturations", "users"),
    [
        (QosState(100), (1.7, 1.7), [100, 50]),  # far too slow twice: half
        (QosState(100), (1.7, 1.5), [100, 80]),  # one of the two was not so far
        (QosState(100, good=80), (9.0, 9.0), [100, 90]),  # between what is known
        (QosState(100), (0.95, 0.8, 0.95), [100, 100, 100]),  # too slow once is forgiven
    ],
)
def test_far_too_slow_twice_takes_half_away_and_too_slow_once_is_forgiven(
    state: QosState, saturations: tuple[float, ...], users: list[int]
):
    left, found = look(state, *saturations)
    assert found == users
    assert (left.bad is None) == (found[-1] == 100)


def test_what_was_found_is_looked_at_four_times_more_before_it_is_the_answer():
    state = QosState(60)
    for saturation in (0.8, 0.78, 0.82):
        assert not state.confirming
        state, decision = decide_qos(state, saturation, 0.8)
    assert not decision.done and decision.users == 60
    dones = []
    for _ in range(CONFIRMING):
        state, decision = decide_qos(state, 0.85, 0.8)
        dones.append(decision.done)
    assert dones == [False, False, False, True]


def test_a_single_user_who_waits_too_long_ends_the_search_with_nobody():
    state, decision = decide_qos(QosState(1), 5.0, 0.8)
    assert not decision.done
    state, decision = decide_qos(state, 5.0, 0.8)
    assert decision.done and state.good == 0 == most_users(state, 0.8)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ([(100, 0.64), (120, 0.96)], 110),
        ([(100, 0.7), (100, 0.9), (120, 0.75), (120, 0.95)], 102),
        ([(20, 0.01), (100, 0.64), (120, 0.96), (200, 40.0)], 110),  # far away has no weight
        ([(100, 0.6), (120, 0.7)], 120),  # no further than was tried
        ([(100, 0.9), (120, 1.2)], 100),
        ([(100, 0.79), (100, 0.81)], 90),  # at one number of users there is no line
        ([(100, 0.9), (120, 0.7)], 90),  # nor when more users are better off
    ],
)
def test_the_answer_is_where_all_looks_together_cross_the_target(
    seen: list[tuple[int, float]], expected: int
):
    assert most_users(QosState(100, good=90, seen=tuple(seen)), 0.8) == expected


def test_saturation_is_that_of_the_class_that_is_worst_off():
    served = {"interactive": [10.0] * 19 + [40.0], "batch": [100.0] * 18 + [1500.0] * 2}
    assert autoscale.saturation(served) == 1.5
    assert autoscale.saturation({"interactive": [10.0] * 20, "batch": []}) == 0.2
    assert autoscale.saturation({}) == 0.0


def test_capacity_stops_after_two_looks_that_were_no_better_and_names_the_peak():
    state, users, dones = CapacityState(50), [], []
    for throughput in (100, 110, 110, 110):
        state, decision = decide_capacity(state, throughput)
        users.append(decision.users)
        dones.append(decision.done)
    assert dones == [False, False, False, True]
    assert users == [70, 84, 100, 70], "40%, then 20%, and in the end back to the peak's"
    assert (state.peak, state.peak_users) == (110, 70)


FIRST = 20
INTERVAL_S = 4.0
"""Of simulated time between two looks: as short as still leaves enough answers for a P95."""


async def search(mode: str, seed: int, bytes_per_s: float, generation_s: float) -> Scaling:
    workload = Workload(MODELS["tiny-1b"], seed)
    shape = shape_of(workload.model, 512, 1 / 64)
    driver = Driver(workload, EmulatedBackend(bytes_per_s), shape, Pace(generation_s))
    scaling = Scaling(driver, mode, FIRST, 0.8, INTERVAL_S)
    task = asyncio.create_task(scaling.run())
    await driver.run_users(FIRST, 600.0)
    await task
    return scaling


def test_the_most_users_of_a_device_are_the_same_within_15_percent_in_two_runs():
    """A little faster or slower, so that no two runs go the same way."""
    found = []
    for speed in (1.0, 1.006):
        scaling = fake_time.run(search("qos", 1, 5e8 * speed, 0.002))
        assert scaling.summary["converged"]
        found.append(scaling.summary["final_user_count"])
        for before, step in itertools.pairwise(scaling.steps):
            if before["users"] == step["users"]:  # there was time to come and to leave
                assert step["active"] == step["users"], "users really come and go"
    assert min(found) > FIRST and max(found) <= 1.15 * min(found), found


def test_the_peak_of_a_device_is_its_speed_within_10_percent():
    bytes_per_s = 1e8
    summary = fake_time.run(search("capacity", 1, bytes_per_s, 0.0)).summary
    assert summary["converged"]
    assert abs(summary["peak_throughput"] * 1e9 / bytes_per_s - 1) <= 0.10


def test_a_store_that_never_answers_is_overloaded_rather_than_waited_for_for_ever():
    async def run() -> Scaling:
        return await search("qos", 1, 1.0, 0.0)

    summary = fake_time.run(run()).summary
    assert summary["final_user_count"] == 0
