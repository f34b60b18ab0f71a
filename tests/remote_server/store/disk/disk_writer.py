"""A process that writes blocks until it is killed, and prints which have been written.

`python disk_writer.py FOLDER FIRST` writes block number n = FIRST, FIRST + 1, … under the key
n mod 40, 8 at a time, and prints the highest n that is written.
"""

import sys
from pathlib import Path

from disk_helpers import RealDisk, budget_for

BLOCK = 65_536
NUM_KEYS = 40
BUDGET, SEGMENT_BYTES = budget_for(8, 16, BLOCK)  # room for all keys twice: nothing is evicted


def data_of(number: int) -> bytes:
    return number.to_bytes(8, "big") * (BLOCK // 8)


def main(folder: Path, number: int) -> None:
    disk = RealDisk(folder, BUDGET, SEGMENT_BYTES)
    disk.drain()
    while True:
        numbers = range(number, number + 8)
        disk.put_all([b"%d" % (n % NUM_KEYS) for n in numbers], [data_of(n) for n in numbers])
        number += 8
        print(number - 1, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
