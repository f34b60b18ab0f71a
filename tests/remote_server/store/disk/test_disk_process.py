"""Real processes, killed while they write: twice, or KVFERRY_KILLS=100."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from disk_helpers import RealDisk
from disk_writer import BUDGET, NUM_KEYS, SEGMENT_BYTES, data_of

from remote_server.store.disk.segments import OVERHEAD_BYTES

pytestmark = pytest.mark.real_time

NUM_KILLS = int(os.environ.get("KVFERRY_KILLS", "2"))
HERE = Path(__file__).parent
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parents[3])]),
}


def write_until_killed(folder: Path, first: int, num_lines: int) -> int:
    """The highest number that the process printed as written."""
    command = [sys.executable, str(HERE / "disk_writer.py"), str(folder), str(first)]
    last = first - 1
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            for _ in range(num_lines):
                last = int(process.stdout.readline())
        finally:
            process.kill()
        for line in process.stdout:  # what it printed before it ended
            last = int(line) if line.endswith("\n") else last
    assert process.returncode == -9
    return last


@pytest.mark.timeout(600)
def test_a_server_killed_while_it_writes_finds_every_block_it_said_was_written(tmp_path):
    rng = random.Random(5)
    last = -1
    for _ in range(NUM_KILLS):
        last = write_until_killed(tmp_path, last + 1, rng.randrange(3, 60))
        with RealDisk(tmp_path, BUDGET, SEGMENT_BYTES) as disk:
            disk.drain()
            newest = last
            for number in range(max(0, last - NUM_KEYS + 1), last + 1):
                data = disk.read(b"%d" % (number % NUM_KEYS))
                assert data is not None, f"block {number} was written and is lost"
                found = int.from_bytes(data[:8], "big")
                assert data == data_of(found), "bytes that nobody wrote"
                assert found >= number, "an older copy than the one that was written"
                assert found % NUM_KEYS == number % NUM_KEYS
                newest = max(newest, found)
            assert newest <= last + 8, "more than one put was under way"
            assert disk.tier.segments.file_bytes <= BUDGET
            slots = sum(segment.num_slots for segment in disk.tier.segments.all)
            free = sum(len(segment.free) for segment in disk.tier.segments.all)
            assert free + disk.tier.num_blocks("ns") == slots, "a slot is lost"
        last = newest
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert OVERHEAD_BYTES + sum(sizes) <= BUDGET
