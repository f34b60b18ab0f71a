"""Accounting: each tier's contents and transfers, against arithmetic over its requests.

Three counts are kept independently: the driver's samples, the store's counters, and the tiers'
occupancy. They agree at the end of every run, to the block and to the byte, or the run has failed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.storage_workload.backends.backend import Occupancy
from benchmarks.storage_workload.figures.samples import TransferSample


class Line(NamedTuple):
    """A number counted in two ways."""

    tier: str
    what: str
    counted: int
    arithmetic: int

    @property
    def agrees(self) -> bool:
        return self.counted == self.arithmetic


class Slots(NamedTuple):
    """Bytes of budget that a block of any length takes in each tier."""

    memory: int
    disk: int


def line_of_stuck(num_stuck: int) -> Line:
    """Requests that were cancelled while the store worked for them: the lines that follow may then
    disagree for that alone."""
    return Line("driver", "requests that the store did not answer in time after the end",
                num_stuck, 0)  # fmt: skip


def lines_of(
    transfers: Sequence[TransferSample],
    counters: Mapping[str, int],
    occupancy: Mapping[str, Occupancy],
    slots: Slots,
    *,
    has_memory: bool,
    is_cascade: bool = False,
) -> list[Line]:
    """Lines of a store in this process, after all transfers have ended."""
    memory = occupancy["memory"]
    there = (
        counters["put_created"] + counters.get("disk_promoted", 0)
        - counters["evicted"] - counters["staged_out"] - counters["integrity_checksum"]
    )  # fmt: skip
    lines = [
        Line("memory", "blocks: created + promoted - evicted - let go - damaged",
             memory.blocks, there),
        Line("memory", "bytes: blocks x slot", memory.used_bytes, memory.blocks * slots.memory),
        Line("memory", "bytes within budget", min(memory.used_bytes, memory.budget_bytes),
             memory.used_bytes),
        Line("memory", "blocks read: the store's and the samples'",
             counters["hits_memory"], _blocks(transfers, "read", "memory")),
        Line("memory", "damaged blocks", counters["integrity_checksum"], 0),
    ]  # fmt: skip
    if not has_memory:
        lines.append(Line("memory", "blocks that stayed without a memory tier", memory.blocks, 0))
    created = _blocks(transfers, "write", "memory" if has_memory else "disk")
    lines.append(
        Line("memory" if has_memory else "disk", "blocks created: the store's and the samples'",
             counters["put_created"] - (0 if has_memory else counters["disk_demote_declined"]),
             created)
    )  # fmt: skip
    if "disk" in occupancy:
        disk = occupancy["disk"]
        kept = (
            counters["disk_written"] - counters["disk_evicted"] - counters["disk_removed"]
            - counters["disk_read_damaged"] - counters["disk_read_io_error"]
        )  # fmt: skip
        lines += [
            Line("disk", "blocks: written - evicted - removed", disk.blocks, kept),
            Line("disk", "bytes: blocks x slot", disk.used_bytes, disk.blocks * slots.disk),
            Line("disk", "bytes within budget", min(disk.used_bytes, disk.budget_bytes),
                 disk.used_bytes),
            Line("disk", "blocks written: the store's and the samples'",
                 counters["disk_written"], _blocks(transfers, "write", "disk")),
            Line("disk", "bytes written: the store's and the samples'",
                 counters["disk_written_bytes"], _bytes(transfers, "write", "disk")),
            Line("disk", "blocks read: the store's and the samples'",
                 counters["hits_disk"], _blocks(transfers, "read", "disk")),
            Line("disk", "damaged blocks",
                 counters["disk_read_damaged"] + counters["disk_read_io_error"], 0),
            _offered(counters, is_cascade=is_cascade),
        ]  # fmt: skip
    if is_cascade:
        lines.append(Line("memory", "blocks evicted before they were offered to the disk",
                          counters["evicted"], 0))  # fmt: skip
    return lines


def _offered(counters: Mapping[str, int], *, is_cascade: bool) -> Line:
    """A cascade declines each block at its put, and offers it at its eviction from memory."""
    become = (
        counters["disk_demoted"] + counters["disk_demoted_late"] + counters["disk_demote_declined"]
    )
    if not is_cascade:
        return Line("disk", "put = written + too late + declined", counters["put_created"], become)
    return Line(
        "disk", "left memory = written + too late + declined", counters["cascade_offered"],
        become - counters["disk_declined_first_time"],
    )  # fmt: skip


def lines_of_gpu(
    transfers: Sequence[TransferSample],
    counters: Mapping[str, int],
    gpu: Occupancy,
    row_bytes: int,
) -> list[Line]:
    """Lines of the GPU above a store; the store's own lines cover the other tiers."""
    filled = counters["gpu_written"] + counters["gpu_promoted"]
    return [
        Line("gpu", "blocks: written + promoted - evicted - damaged", gpu.blocks,
             filled - counters["gpu_evicted"] - counters["gpu_damaged"]),
        Line("gpu", "bytes of rows in use: blocks x row", gpu.used_bytes, gpu.blocks * row_bytes),
        Line("gpu", "bytes within budget", min(gpu.used_bytes, gpu.budget_bytes), gpu.used_bytes),
        Line("gpu", "blocks written and promoted: the tier's and the samples'",
             filled, _blocks(transfers, "write", "gpu")),
        Line("gpu", "blocks hit: the tier's and the samples'",
             counters["gpu_hits"], _blocks(transfers, "read", "gpu")),
        Line("gpu", "damaged blocks, of those compared", counters["gpu_damaged"], 0),
    ]  # fmt: skip


def lines_over_the_wire(
    transfers: Sequence[TransferSample], counters: Mapping[str, int]
) -> list[Line]:
    """Lines of a server without other clients; `counters` are those of this run."""
    return [
        Line("server", "blocks created: the server's and the samples'",
             counters["put_created"], _blocks(transfers, "write")),
        Line("server", "blocks got: the server's, less those lost on the way up, and the samples'",
             counters["get_hit"] - counters.get("disk_lost", 0), _blocks(transfers, "read")),
        Line("server", "damaged blocks", counters["integrity_checksum"], 0),
    ]  # fmt: skip


def lines_of_a_device(transfers: Sequence[TransferSample], held: Occupancy) -> list[Line]:
    """Lines of an emulated device, which keeps all blocks."""
    written = [transfer for transfer in transfers if transfer.direction == "write"]
    return [
        Line("emulated", "blocks: the device's and the samples'",
             held.blocks, sum(transfer.blocks for transfer in written)),
        Line("emulated", "bytes: the device's and the samples'",
             held.used_bytes, sum(transfer.num_bytes for transfer in written)),
    ]  # fmt: skip


def _blocks(transfers: Sequence[TransferSample], direction: str, tier: str = "") -> int:
    return sum(transfer.blocks for transfer in _of(transfers, direction, tier))


def _bytes(transfers: Sequence[TransferSample], direction: str, tier: str) -> int:
    return sum(transfer.num_bytes for transfer in _of(transfers, direction, tier))


def _of(transfers: Sequence[TransferSample], direction: str, tier: str) -> Iterator[TransferSample]:
    """Transfers of one tier, or of all."""
    for transfer in transfers:
        if transfer.direction == direction and tier in ("", transfer.tier):
            yield transfer
