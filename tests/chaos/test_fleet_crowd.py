"""A thousand engines on four servers: what each costs a server, and that nothing grows."""

import os
import subprocess
import sys

import pytest
from fleet_soak import FILLED, Load, MiB, grown, soak


@pytest.mark.timeout(480)
def test_a_thousand_engines_cost_each_server_little_and_nothing_grows(whole, tmp_path, capsys):
    """For a minute as one of all tests, else for seconds; `make fleet-soak` goes on for longer."""
    load = Load(24, 2.5, 150, 10) if whole else Load(8, 0.5, 100, 8)
    result = soak(tmp_path, load)
    with capsys.disabled():
        print(f"\n{result}")
    result.check()
    assert result.replaced >= 0.7 * load.parts * load.part_s * load.engines_replaced_a_second
    assert result.asked >= 0.9 * load.parts * load.part_s * load.lookups_a_second


def test_growth_is_measured_between_the_second_quarter_and_the_last():
    assert grown([1, 1, 100, 100, 7, 7, 110, 110]) == pytest.approx(0.1)
    assert grown([5, 1, 100, 100, 7, 7, 90, 110]) == 0.0


@pytest.mark.parametrize("env", [{}, FILLED], ids=["touched", "filled"])
def test_memory_that_was_allocated_and_not_used_counts_where_it_is_filled(env):
    """It is on the heap, as that of a server is: glibc maps larger pieces by themselves."""
    program = (
        "import ctypes, chaos_server, os\n"
        "malloc = ctypes.CDLL(None).malloc\n"
        "before = chaos_server.resident_bytes(os.getpid())\n"
        f"for _ in range(1024): malloc({16 * 1024})\n"
        "print(chaos_server.resident_bytes(os.getpid()) - before)"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(ran.stdout) >= 15 * MiB) == bool(env)
