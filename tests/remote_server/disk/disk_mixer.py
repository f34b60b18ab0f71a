"""A process that writes blocks and reads them back, until its input ends; then it prints "right".

`python disk_mixer.py FOLDER` prints a line for each round. A round replaces eight blocks and reads
forty, in jobs side by side; a block of other bytes than those of its last write ends the process.
"""

import select
import sys
from pathlib import Path

from disk_helpers import RealDisk, wait_for
from disk_writer import BLOCK, BUDGET, NUM_KEYS, SEGMENT_BYTES, data_of

KEYS = [b"%d" % number for number in range(NUM_KEYS)]


def read_all(disk: RealDisk) -> list[bytearray]:
    blocks = disk.tier.pin_all("ns", KEYS)
    rows = [bytearray(BLOCK) for _ in blocks]
    results: list[list[bool]] = []
    for first in range(0, NUM_KEYS, 4):
        part = slice(first, first + 4)
        disk.tier.read(blocks[part], [*map(memoryview, rows[part])], results.append)
    wait_for(disk.tier, disk.event, lambda: len(results) == NUM_KEYS // 4)
    assert all(map(all, results)), "a block is lost"
    return rows


def main(folder: Path) -> None:
    newest = [*range(NUM_KEYS)]
    with RealDisk(folder, BUDGET, SEGMENT_BYTES) as disk:
        disk.put_all(KEYS, [*map(data_of, newest)])
        number = NUM_KEYS
        while not select.select([sys.stdin], [], [], 0)[0]:
            numbers = range(number, number + 8)
            disk.put_all([KEYS[n % NUM_KEYS] for n in numbers], [*map(data_of, numbers)])
            for n in numbers:
                newest[n % NUM_KEYS] = n
            assert read_all(disk) == [*map(data_of, newest)], "other bytes"
            number += 8
            print(number, flush=True)
    print("right", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
