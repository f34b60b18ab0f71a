"""Turns of tenants whose requests take unequal time: each tenant gets the same time."""

from collections import Counter

from remote_server.turns import Turns

STEP_S = {"slow": 0.004, "quick": 0.001}


def test_tenants_have_equal_time_and_not_equally_many_steps():
    took: Counter[str] = Counter()
    turns: Turns[str] = Turns(lambda: took.total())

    def step(tenant: str) -> bool:
        took[tenant] += STEP_S[tenant]
        return False

    for tenant in STEP_S:
        turns.add(tenant, f"connection of {tenant}", tenant)
    for _ in range(100):
        turns.take_turn(step)
    assert abs(took["slow"] - took["quick"]) <= STEP_S["slow"] + 1e-9
