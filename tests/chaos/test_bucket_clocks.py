"""Clocks that jump above a bucket: the age of a pack is by the store's clock, whatever the server
holds for the time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bucket_helpers import folder_url
from bucket_scene import PATIENCE_S, bucket_server, prompt, put, states
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from packs_seen import look_at
from wall_clock import WallClock

from remote_server.store.bucket.objects import Objects

pytestmark = pytest.mark.whole

DAY_S = 86_400
YEAR_S = 365 * DAY_S
SPEED = 60.0
"""A sweep a second."""


@pytest.fixture
def url(tmp_path):
    return folder_url(tmp_path)


@pytest.fixture
def wall_clock(tmp_path):
    clock = WallClock(tmp_path)
    clock.jump(YEAR_S)
    seen = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"],
        env=os.environ | clock.environment, capture_output=True, check=True,
    )  # fmt: skip
    assert float(seen.stdout) > time.time() + YEAR_S / 2, "the clock of a process is ours"
    clock.jump(0)
    return clock


def test_a_wall_clock_that_jumps_removes_no_young_pack(url, wall_clock):
    """And what is old by the clock of the store goes, whatever the server's has become."""
    objects = Objects(url)
    limits = ("--bucket-days", "2", "--ttl-s", str(DAY_S), "--bucket-bytes", "64MiB")
    with bucket_server(url, wall_clock.environment, *limits, speed=SPEED) as server:
        with ChaosClient(server.endpoint, "tcp") as client:
            client.wait_until_ready()
            for number, jump in enumerate((0, YEAR_S, -YEAR_S)):
                wall_clock.jump(jump)
                assert put(client, prompt(16 * number)) == "stored"
                sweeps(server, 2)
                assert look_at(objects) == {"whole": 2 * (number + 1)}
                assert any(states(client, prompt(0)))
        old = time.time() - 2 * DAY_S
        for path in sorted(Path(url.removeprefix("file://")).rglob("v1/=/*/*/*"))[:3]:
            os.utime(path, (old, old))
        sweeps(server, 2)
        counters = server.stats().counters
        assert counters["bucket_swept_packs"] == 3
        assert look_at(objects) == {"whole": 3}


def sweeps(server: ChaosServer, count: int) -> None:
    """Return when all partitions have been swept `count` times, which a budget makes one sweep."""
    before = server.stats().counters["bucket_sweeps"]
    eventually(
        lambda: server.stats().counters["bucket_sweeps"] >= before + count, "it sweeps", PATIENCE_S
    )
