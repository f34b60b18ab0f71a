"""A process that streams the same blocks in a loop until it is ended.

python -m … ENDPOINT NAMESPACE BLOCK_BYTES NUM_BLOCKS
"""

import sys
from collections.abc import Sequence

from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.ferry_client import PATIENCE_S, connect, key_of

_AT_ONCE = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Prints `ready` when the first blocks have arrived."""
    endpoint, namespace, *numbers = sys.argv[1:] if argv is None else argv
    block_bytes, num_blocks = map(int, numbers)
    client = connect(endpoint, namespace, block_bytes)
    rows = [memoryview(row) for row in blocks.allocate(_AT_ONCE, block_bytes)]
    announced = False
    while True:
        for first in range(0, num_blocks, _AT_ONCE):
            keys = [key_of(number) for number in range(first, min(first + _AT_ONCE, num_blocks))]
            result = client.get(
                namespace, keys, rows[: len(keys)], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
            ).result()
            if len(result.landed) != len(keys):
                sys.exit(f"not all blocks came: {result.outcomes}, {result.error}")
            if not announced:
                print("ready", flush=True)
                announced = True


if __name__ == "__main__":
    main()
