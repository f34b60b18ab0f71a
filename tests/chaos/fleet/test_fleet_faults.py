"""One server of a fleet is killed, frozen, cut off or slow, again and again, under load.

A request is what an engine asks for one prompt: a lookup, a get of the prefix, a put of the rest.
Whatever happens to one server, every row that lands is right, and every request ends in time and
has an answer. The breakers of the other servers stay closed. When the server is back, hits are
what they were.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from chaos_server import eventually
from fleet_client import IMPATIENT, PATIENT, FleetClient
from fleet_load import FleetLoad, failed, hit_rate
from fleet_servers import FAULTS, NAMES, FleetServers, nothing_left

from remote_server.client.lanes.opening import why_slow

NUM_PROMPTS = 24

RECOVERED = 0.95

MOST_WAITS = 8
"""Lookups of one client that wait for one fault in vain: three until a breaker opens, those of the
probes that come before it knows, and as many for a restart in the middle of it."""


def test_a_server_that_is_killed_costs_its_hits_and_nothing_else(seed, rng, tmp_path):
    """With patience: no lookup meets its deadline, so that no clock has a part in it."""
    with FleetServers(tmp_path, names=NAMES[:3]) as servers:
        suffer(servers, ["kill"], rng, seed, num_clients=2, is_timed=False)


@pytest.mark.whole
@pytest.mark.timeout(900)
def test_whatever_happens_to_one_server_costs_its_hits_and_few_lookups_wait(seed, rng, tmp_path):
    faults = [*FAULTS] * 4
    rng.shuffle(faults)
    with FleetServers(tmp_path) as servers:
        suffer(servers, faults, rng, seed, num_clients=8, is_timed=True)


def suffer(
    servers: FleetServers, faults: Sequence[str], rng: random.Random, seed: int, *,
    num_clients: int, is_timed: bool,
) -> None:  # fmt: skip
    served = 0
    with nothing_left(), ExitStack() as stack:
        clients = [
            stack.enter_context(FleetClient(servers.addresses(), ("lanes", "auto")[number % 2]))
            for number in range(num_clients)
        ]
        for client in clients:
            client.wait_until_complete()
        for number, kind in enumerate(faults):
            # Some new ones each time: rows that were recomputed in an outage are on both homes.
            first = number * NUM_PROMPTS // 2
            load = FleetLoad(clients, range(first, first + NUM_PROMPTS), f"{seed}/{number}")
            load.sweep()
            one_fault(kind, rng, servers, load, is_timed)
            served += len(load.served)
        for client in clients:
            client.check()
        servers.wait_until_at_rest()
        for one in servers.all:
            lanes = one.proxy.counts["lanes"] or why_slow()
            assert lanes, f"no lane to {one.name}: the faults met none"
        blocks = sum((client.blocks for client in clients), Counter())
        for client in clients:
            client.close()
        servers.check_nothing_is_held()
    print(f"seed {seed}: {served} requests, {blocks['hit']} rows landed, 0 wrong")
    assert blocks["hit"] > 10 * served, "most were misses: nothing was tried"


def one_fault(
    kind: str, rng: random.Random, servers: FleetServers, load: FleetLoad, is_timed: bool
) -> None:
    victim = servers[rng.choice([*servers.by_name])]
    servers.wait_until_at_rest()
    before = load.sweep()
    assert before > 0.99, "all rows fit"
    opened = [client.opened() for client in load.clients]
    with load.running(IMPATIENT if is_timed else PATIENT) as during:
        load.until_served(during, 2 * len(load.clients))
        with victim.fault(kind):
            load.until_served(during, (100 if is_timed else 20) * len(load.clients))
    others = [
        f"{name} of client {number}"
        for number, client in enumerate(load.clients)
        for name, count in client.opened().items()
        if name != victim.name and count > opened[number][name]
    ]
    assert not others, f"{kind} of {victim.name}: breakers of others opened: {others}"
    assert not failed(during), f"{kind}: requests without an answer"
    waits = sum(one.waited for one in during)
    assert waits <= MOST_WAITS * len(load.clients), f"{kind}: {waits} lookups waited"

    eventually(lambda: all(client.complete for client in load.clients), "it is used again")
    # Of a connection that lost a part of a message the first sweep finds out.
    rates = [load.sweep(IMPATIENT), load.sweep()]
    assert rates[-1] >= RECOVERED * before, f"{kind}: {before:.3f} before, then {rates}"
    print(
        f"  {kind:22} of {victim.name}: {len(during):5} requests, hits {hit_rate(during):4.0%}, "
        f"{waits:2} lookups waited, longest {max(one.lookup_s for one in during):.3f} s; hits "
        f"{before:.0%} before, then {rates[0]:.0%} {rates[1]:.0%}"
    )
