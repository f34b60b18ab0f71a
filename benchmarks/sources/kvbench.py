"""A study of NIXL on one GPU, with the block sizes of real models."""

from benchmarks.harness.source import Correction, Document, Table

MiB = 1 << 20
_BLOCK_BYTES = 5 * MiB // 2
_STAGES = (
    # backend, requests, blocks of 16 tokens, prepare, post, transfer, GiB/s as in the document
    ("GDS", 1, 63, 28, 8, 20_000, 12.5),
    ("POSIX", 1, 63, 25, 14_000, 1_000, 21.4),
    ("POSIX", 10, 625, 25, 20_000, 250, 19.5),
)


def gib_per_s(blocks: int, *microseconds: int) -> float:
    """The throughput of a batch from the sum of its stages."""
    return blocks * _BLOCK_BYTES / (1 << 30) / (sum(microseconds) / 1e6)


DOCUMENT = Document(
    "KV Bench — model-realistic KV-cache transfers",
    "one GPU, which it does not name; nvidia-fs 2.28.4, CUDA 12.9, one thread, into GPU memory",
    [
        Table(
            "benchmarks.kvbench",
            "Throughput by model and backend",
            "GiB/s",
            ["model", "a block", "GDS, r=1", "POSIX, r=1", "POSIX, r=10"],
            [
                ["DeepSeek R1", "549 KiB", 16.4, 14.8, None],
                ["Llama 70B", "2.5 MiB", 12.5, 21.4, 19.5],
                ["Llama 8B", "1 MiB", None, None, 17.2],
            ],
            [
                Correction(
                    "blocks of 549 KB and 2.5 MB",
                    "they are KiB and MiB: 562,176 and 2,621,440 bytes, 16 tokens in fp8",
                ),
                Correction(
                    "diminishing returns past a batch of about 100",
                    "it has two points, 63 and 625 blocks, one run each and no spread. Ten prompts "
                    "of 1,000 tokens fill 630 blocks, because each fills its last one alone",
                ),
                Correction(
                    "GDS hangs at batches of 256 and more",
                    "its GDS figures are of r=1 alone for that reason. Here a window bounds what "
                    "is on the way, whatever the batch, in the row gds as well (SKIPPED without a "
                    "GPU)",
                ),
                Correction(
                    "for blocks below a MiB, prefer GDS",
                    "that rests on one model, 16.4 to 14.8, whose POSIX run is not shown for r=10",
                ),
            ],
        ),
        Table(
            "benchmarks.kvbench",
            "Stages of a batch of Llama 70B",
            "microseconds, but for GiB/s",
            ["backend", "requests", "blocks", "prepare", "post", "transfer",
             "GiB/s it reports", "GiB/s of those times"],
            [[*stages, round(gib_per_s(stages[2], *stages[3:6]), 1)] for stages in _STAGES],
            [
                Correction(
                    "21.4 GiB/s beside 25 + 14,000 + 1,000 µs (and 12.5, 19.5 in the other rows)",
                    "63 blocks of 2.5 MiB in 15,025 µs are 10.2 GiB/s; the other rows' times give "
                    "7.7 and 75. Stages and throughput cannot be of the same batches, so nothing "
                    "is compared with either. Here the stages add up to the batch's time",
                ),
            ],
        ),
    ],
)  # fmt: skip
