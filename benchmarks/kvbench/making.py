"""The ways by name: each is made over the same rows, or skipped with the reason."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.runner import nothing
from benchmarks.kvbench.device_ways import DeviceRows, Vram, VramThroughServer
from benchmarks.kvbench.file_ways import OneFile
from benchmarks.kvbench.nixl_ways import GDS, NixlFile
from benchmarks.kvbench.plan import Plan
from benchmarks.kvbench.transfer import Way
from benchmarks.kvbench.ways import Memory, Rows, Server
from benchmarks.remote_kv_cache.work import blocks
from benchmarks.remote_kv_cache.work.blocks import SharedPool
from benchmarks.remote_kv_cache.work.ferry_client import connect_to
from benchmarks.remote_kv_cache.work.target import Target
from remote_server.store.pages import padded

MEMORY, SHM, TCP, BUFFERED, DIRECT, NIXL = "memory", "shm", "tcp", "file", "file O_DIRECT", "nixl"
VRAM, VRAM_SHM, VRAM_TCP, VRAM_GDS = "vram", "vram shm", "vram tcp", "gds"
WAYS = (MEMORY, SHM, TCP, BUFFERED, DIRECT, NIXL, VRAM, VRAM_SHM, VRAM_TCP, VRAM_GDS)

_OF_A_DEVICE = (VRAM, VRAM_SHM, VRAM_TCP, VRAM_GDS)
THROUGH_SERVER = {SHM: "shm", TCP: "tcp", VRAM_SHM: "shm", VRAM_TCP: "tcp"}
_NAMESPACE = "kvbench"


class Kept:
    """The contents of one place: the mark that its last write put into every block."""

    def __init__(self) -> None:
        self.mark: int | None = None


class Made(NamedTuple):
    """A way, and the parts that its trials need."""

    way: Way
    kept: Kept
    clear: Callable[[], object] = nothing
    """Called before a write to a store that does not overwrite blocks."""

    device: DeviceRows | None = None
    """The memory of its blocks, if not the rows themselves."""


class Maker:
    """Makes ways over one plan's rows. All that it opens is closed with `stack`."""

    def __init__(
        self,
        stack: ExitStack,
        plan: Plan,
        rows: Rows,
        pools: tuple[SharedPool, SharedPool],
        scratch: Path,
        server: Target | None = None,
        device: str = "cuda",
    ) -> None:
        """`server` is used by the first way that needs one; without it one is started."""
        self._stack = stack
        self._plan = plan
        self.rows = rows
        self._pools = pools
        self._scratch = scratch
        self._server = server or Target()
        self._address = ""
        self._device = device
        self._device_rows: DeviceRows | None = None
        self._in_server = Kept()

    def make(self, name: str) -> Made:
        """Raises `Skipped` when this machine has no such way."""
        device = self._rows_on_device() if name in _OF_A_DEVICE else None
        if name == MEMORY:
            return Made(Memory(self.rows, blocks.allocate(*self.rows.padded_source.shape)), Kept())
        if name in THROUGH_SERVER:
            through = self._through_server(THROUGH_SERVER[name])
            way = through if device is None else VramThroughServer(through, device)
            return Made(way, self._in_server, through.clear, device)
        if name == VRAM and device is not None:
            return Made(Vram(self.rows, device), Kept(), device=device)
        if name in (NIXL, VRAM_GDS):
            backend = {"backend": GDS} if name == VRAM_GDS else {}
            nixl = NixlFile(self._scratch, self.rows, device=device, **backend)
            self._stack.callback(nixl.close)
            return Made(nixl, Kept(), device=device)
        file = OneFile(self._scratch, self.rows, direct=name == DIRECT)
        self._stack.callback(file.close)
        return Made(file, Kept())

    def _rows_on_device(self) -> DeviceRows:
        if self._device_rows is None:
            self._device_rows = DeviceRows(self.rows, self._device)
        return self._device_rows

    def _through_server(self, transport: str) -> Server:
        if not self._address:
            needed = self._plan.batch * padded(self._plan.block_bytes)
            self._address = self._stack.enter_context(
                self._server.server(_NAMESPACE, needed, self._plan.block_bytes)
            )
        namespace = self._server.namespace(_NAMESPACE)
        client = connect_to(
            self._address, namespace, self._plan.block_bytes, transport=transport,
            rows=self._pools if transport == "shm" else (),
        )  # fmt: skip
        self._stack.callback(client.close)
        of = self._plan.configuration
        pages = -(-of.prompt_tokens // of.page_size)
        return Server(client, namespace, self.rows, pages, of.page_size)
