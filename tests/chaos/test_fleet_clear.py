"""`kvferry clear` of a list while one server is down: it reports the server, and clears the others.

What a server that was down has kept is right, and a second `clear` removes it.
"""

import subprocess
import sys

import pytest
from chaos_server import eventually
from fleet_client import FleetClient, rows_of
from fleet_load import FleetLoad
from fleet_servers import NAMES, FleetServers, NamedServer, nothing_left

from remote_server.protocol import KeyState

NUM_PROMPTS = 24


def clear(listed: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "remote_server.cli", "clear", "--all", "--yes"]
    flags = ["--server", listed, "--timeout-s", "3"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)


def blocks_of(one: NamedServer) -> int:
    """In any of its tiers."""
    return sum(tier.blocks for tier in one.server.stats().tiers.values())


def found(client: FleetClient) -> int:
    """The rows that are readable somewhere."""
    return sum(client.states(prompt).count(KeyState.READABLE) for prompt in range(NUM_PROMPTS))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["kill", pytest.param("freeze", marks=pytest.mark.whole)])
def test_clear_names_the_server_that_is_down_and_a_second_one_leaves_nothing(
    kind, rng, seed, tmp_path
):
    with FleetServers(tmp_path) as servers:
        listed, victim = servers.write_list(), servers[rng.choice(NAMES)]
        others = [one for one in servers.all if one is not victim]
        with nothing_left(), FleetClient(listed) as client:
            client.wait_until_complete()
            FleetLoad([client], range(NUM_PROMPTS), seed).sweep()
            servers.wait_until_at_rest()
            assert found(client) == NUM_PROMPTS * len(rows_of(0))
            its_blocks = blocks_of(victim)
            assert its_blocks

            with victim.fault(kind):
                first = clear(listed)
            output = first.stdout + first.stderr
            assert first.returncode == 1, output
            assert victim.name in output, "it is named"
            assert not any(blocks_of(one) for one in others), "the others are cleared"

            eventually(lambda: client.complete, "the server is back")
            if kind == "kill":
                left = found(client)
                assert left, "what was on its disk has survived"
                assert FleetLoad([client], range(NUM_PROMPTS), seed).sweep() > 0
            second = clear(listed)
            assert second.returncode == 0, second.stdout + second.stderr
            assert found(client) == 0
            assert not any(map(blocks_of, servers.all))
            with victim.fault("kill"):
                pass
            eventually(lambda: client.complete, "the server is back")
            assert found(client) == 0 and blocks_of(victim) == 0, "nothing comes back from disk"
            client.check()
        servers.check_nothing_is_held()
