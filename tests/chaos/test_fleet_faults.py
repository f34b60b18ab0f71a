"""One server of four is killed, frozen, cut off or slow, again and again, under load.

A request is what an engine asks for one prompt: a lookup, a get of the prefix, a put of the rest.
Whatever happens to one server, every row that lands is right, every request ends in time and has an
answer, no lookup waits longer than its deadline, and few wait at all. The breakers of the other
servers stay closed. When the server is back, hits are what they were within `R` requests.
"""

import random
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from busy_host import ATTEMPTS
from chaos_server import eventually
from fleet_client import FleetClient
from fleet_load import FleetLoad, failed, hit_rate
from fleet_servers import FAULTS, NAMES, FleetServers, nothing_left

from remote_server.client.lane_opening import why_slow

NUM_PROMPTS = 48
R = 2 * NUM_PROMPTS
"""Requests after which the hits of a server that is back are judged."""

RECOVERED = 0.95

MOST_WAITS = 8
"""Lookups of one client that wait for one fault in vain: three until a breaker opens, those of the
probes that come before it knows, and as many for a restart in the middle of it."""

BACK_S = 15.0
"""A server that is back is used by all clients after so long: twice the longest pause between two
attempts, and a busy machine."""


@pytest.mark.timeout(600)
def test_whatever_happens_to_one_server_costs_its_hits_and_nothing_else(
    whole, seed, rng, tmp_path, capsys
):
    faults, lasts_s = [*FAULTS] * (4 if whole else 1), (4.0 if whole else 1.2)
    num_clients = 8 if whole else 4
    rng.shuffle(faults)
    report = []
    with FleetServers(tmp_path) as servers, nothing_left(), ExitStack() as stack:
        clients = [
            stack.enter_context(FleetClient(servers.addresses(), ("lanes", "auto")[number % 2]))
            for number in range(num_clients)
        ]
        served = 0
        for client in clients:
            client.wait_until_complete()
        for number, kind in enumerate(faults):
            # Some new ones each time: rows that were recomputed in an outage are on both homes.
            first = number * NUM_PROMPTS // 2
            load = FleetLoad(clients, range(first, first + NUM_PROMPTS), f"{seed}/{number}")
            load.sweep()
            report.append(one_fault(kind, rng, servers, load, lasts_s))
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
    with capsys.disabled():
        print(f"\nseed {seed}: {served} requests, {blocks['hit']} rows landed, 0 wrong")
        print("\n".join(report))
    assert blocks["hit"] > 10 * served, "most were misses: nothing was tried"


def one_fault(
    kind: str, rng: random.Random, servers: FleetServers, load: FleetLoad, lasts_s: float
) -> str:
    """What became of it, in a line."""
    victim = servers[rng.choice(NAMES)]
    servers.wait_until_at_rest()
    for _ in range(ATTEMPTS):  # a busy host withholds a put or two
        if (before := load.sweep()) > 0.99:
            break
    assert before > 0.99, "all rows fit"
    opened = [client.opened() for client in load.clients]
    with load.running() as during:
        time.sleep(0.2)
        with victim.fault(kind):
            time.sleep(lasts_s)
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

    began = time.monotonic()
    eventually(lambda: all(client.complete for client in load.clients), "it is used again", BACK_S)
    back_s = time.monotonic() - began
    rates = [load.sweep()]
    while rates[-1] < RECOVERED * before and len(rates) * NUM_PROMPTS < R:
        rates.append(load.sweep())
    assert rates[-1] >= RECOVERED * before, f"{kind}: {before:.3f} before, then {rates}"
    return (
        f"  {kind:22} of {victim.name}: {len(during):5} requests, hits {hit_rate(during):4.0%}, "
        f"{waits:2} lookups waited, longest {max(one.lookup_s for one in during):.3f} s; "
        f"back after {back_s:.1f} s, hits {before:.0%} before, then "
        + " ".join(f"{rate:.0%}" for rate in rates)
    )
