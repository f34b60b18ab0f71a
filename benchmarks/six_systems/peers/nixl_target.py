"""A process that shares its memory with NIXL agents of other processes until it is ended.

    python -m benchmarks.six_systems.peers.nixl_target BYTES

Prints `ready ADDRESS METADATA`, the metadata in base64.
"""

import base64
import signal
import sys

from benchmarks.kvbench.nixl_ways import agent_with
from benchmarks.remote_kv_cache.work.blocks import allocate
from benchmarks.six_systems.peers.nixl import BACKEND


def main() -> None:
    agent = agent_with("six-systems-target", BACKEND)
    memory = allocate(1, int(sys.argv[1]))
    address = int(memory.__array_interface__["data"][0])
    agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM", backends=[BACKEND])
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    print(f"ready {address} {metadata}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
