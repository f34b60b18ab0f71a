"""A cache of four tiers for a supercomputer, beside five other systems."""

from benchmarks.harness.source import Correction, Document, Table

_BENCHMARK = "benchmarks.six_systems"

DOCUMENT = Document(
    "Cascade: four-tier KV cache storage for LLM inference at HPC scale (in Korean)",
    "NERSC Perlmutter: AMD EPYC 7763 (64 cores), 256 GB, 4 x A100-40GB, Slingshot-11, Lustre",
    [
        Table(
            _BENCHMARK,
            "Its six systems, 1 GB of data",
            "GB/s",
            ["its name", "write", "read", "what ran behind the name", "our row of that kind"],
            [
                ["vLLM (GPU HBM)", 8.88, 7.59, "a tensor's .cuda() and .cpu()", "GPU memory"],
                ["LMCache", 3.03, 4.96, "open, write and read of files in /tmp",
                 "files; LMCache, its server, its shared memory, its local disk"],
                ["Cascade", 1.45, 4.24, "a map of a file in /dev/shm", "shared-memory map"],
                ["PDC", 3.03, 3.78, "os.write with fsync, read from the page cache",
                 "files, fsync; PDC itself is SKIPPED"],
                ["HDF5", 3.05, 3.68, "h5py", "HDF5"],
                ["Redis", None, None, "assignment to a Python dictionary",
                 "Redis, tcp; Redis, unix socket; Redis Cluster, three processes"],
            ],
            [
                Correction(
                    "real system code was used, and no simulation is shown as an experiment",
                    "all six are loops in one Python process on one node (\"4 nodes\" stands above "
                    "them), over the same 256 MiB four times, read back from the page cache. Here "
                    "each row is the software that it names, or SKIPPED with the reason",
                ),
                Correction(
                    "six systems",
                    "five have figures: Redis is listed and its row is missing. Its loop took a "
                    "dictionary for Redis, and such figures say nothing about a server",
                ),
                Correction(
                    "Cascade is the proposal",
                    "in its own table it is the slowest to write, and reads slower than the row "
                    "called LMCache",
                ),
            ],
        ),
        Table(
            _BENCHMARK,
            "Its larger runs",
            "GB/s",
            ["run", "of", "write", "read"],
            [
                ["shared memory, a node", "4 nodes", None, 8.61],
                ["Lustre, cold, a node", "4 nodes", None, 1.09],
                ["shared memory, 209.7 GB, all nodes", "4 nodes", 12.46, 17.06],
            ],
            [
                Correction(
                    "12.46 and 17.06 GB/s at large scale",
                    "they are sums over four nodes that do not talk to each other: 3.1 and 4.3 "
                    "each, of which the read is half of the 8.61 above. --processes N measures N "
                    "clients of one host at once, by wall clock",
                ),
            ],
        ),
    ],
)  # fmt: skip
