"""A small model, a cache server with a disk, and an engine between them, on this machine.

All processes use free loopback ports and a temporary folder, and end with the block that started
them, also after an error.
"""

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from examples import tiny_model
from examples.endpoint import Endpoint
from examples.engine import VllmServer
from examples.processes import RemoteServer, StartFailed
from examples.progress import step
from remote_server.client import ClientConfig, RemoteClient
from remote_server.protocol import StatsReply
from remote_server.values import GiB, MiB

BLOCK_TOKENS = 32
_SLABS = 16  # slabs of a server's memory, below 1 GiB

# The measured value is the time of a level: on a busy machine a load must take long and not be
# replaced by computing.
_PATIENT = {"patience": 1000, "max_wait_ms": 20_000}

_OPT_OUT = {"kv_transfer_params": {"kvferry": {"load": False, "store": False}}}


class TooLarge(ValueError):
    """The requested sizes do not fit the model. One line."""


@dataclass(frozen=True)
class Sizes:
    """The size of each level. `engine_blocks` None: one GiB of blocks."""

    pool_bytes: int = 512 * MiB
    memory_bytes: int = 1 * GiB
    disk_bytes: int = 4 * GiB
    engine_blocks: int | None = None
    max_model_len: int = 8192

    @classmethod
    def in_documents(
        cls, length: int, preset: str, *, pool: int, memory: int, disk: int
    ) -> "Sizes":
        """Levels for numbers of documents of `length` tokens, whole blocks; the engine's own cache
        holds one, with the question behind it. Raises `TooLarge`."""
        shape = tiny_model.PRESETS[preset]
        longest = shape.max_position - BLOCK_TOKENS
        if length > longest:
            raise TooLarge(f"--length {length}: the model {preset!r} takes at most {longest}")
        block_bytes = shape.kv_bytes_per_token * BLOCK_TOKENS
        blocks = length // BLOCK_TOKENS
        slots_per_slab = -(-memory * blocks // _SLABS)
        return cls(
            pool_bytes=pool * blocks * block_bytes,
            memory_bytes=_SLABS * slots_per_slab * block_bytes,
            # Each block has a page before it, and files are made in steps.
            disk_bytes=disk * blocks * (block_bytes + 4096) + 256 * MiB,
            # vLLM reserves one block.
            engine_blocks=blocks + 2,
            max_model_len=length + BLOCK_TOKENS,
        )


class LocalStack:
    """Use it in a `with`. `endpoint` is the engine, `client` a client of the cache server.

    Starting raises StartFailed with the end of the log of the failed process; `logs` has all
    logs.
    """

    def __init__(self, preset: str, sizes: Sizes, models: Path, logs: Path) -> None:
        self._preset, self._sizes, self._models, self._logs = preset, sizes, models, logs
        self._cleanup = ExitStack()
        self._running = ExitStack()
        self._starts = self._blocks_on_disk = 0
        self._disk = ""
        self.endpoint: Endpoint
        self.client: RemoteClient

    @property
    def model(self) -> str:
        """The model's name at the engine."""
        return str(self._models / self._preset)

    def __enter__(self) -> Self:
        with ExitStack() as cleanup:
            self._disk = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-disk-"))
            cleanup.callback(self._running.close)
            with step("the model (built once)"):
                tiny_model.build(self._models / self._preset, self._preset)
            self._start()
            self._cleanup = cleanup.pop_all()  # from here on `__exit__` is responsible
        return self

    def __exit__(self, *_: object) -> None:
        with step("ending engine and cache server"):
            self._cleanup.close()

    def restart(self) -> None:
        """Kill the cache server, end the engine, and start both again over the same disk."""
        with step("cache server: kill -9; engine: ended"):
            self._server.stop(kill=True)
            self._running.close()
        blocks = self._blocks_on_disk
        self._start()
        with step("waiting until what the disk holds is verified"):
            self.wait_for_disk(blocks)

    def stats(self) -> StatsReply:
        """Statistics of the cache server."""
        return self.client.stats(timeout_s=10).result()

    def wait_for_disk(self, blocks: int, timeout_s: float = 30) -> None:
        """Wait until the server's disk can serve this many blocks and no transfer is in flight.

        Raises StartFailed on a timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            tiers = self.stats().tiers
            if tiers["disk"].blocks >= blocks and not any(t.pending for t in tiers.values()):
                self._blocks_on_disk = tiers["disk"].blocks
                return
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"the server's disk holds {tiers['disk'].blocks} of {blocks} blocks after "
                    f"{timeout_s:g} s; see the logs in {self._logs}"
                )
            time.sleep(0.02)

    def settle(self, timeout_s: float = 30) -> None:
        """Wait until the server has received and written no block for half a second."""
        deadline = time.monotonic() + timeout_s
        before, since = self._moved(), time.monotonic()
        while time.monotonic() - since < 0.5 and time.monotonic() < deadline:
            time.sleep(0.05)
            if (now := self._moved()) != before or now[-1]:
                before, since = now, time.monotonic()
        self._blocks_on_disk = before[1]

    def _moved(self) -> tuple[int, int, int]:
        stats = self.stats()
        pending = sum(tier.pending for tier in stats.tiers.values())
        return stats.counters["put_total"], stats.tiers["disk"].blocks, pending

    def _start(self) -> None:
        self._starts += 1
        sizes = self._sizes
        self._server = RemoteServer(
            str(sizes.memory_bytes),
            args=[
                *("--disk", self._disk, "--disk-bytes", str(sizes.disk_bytes)),
                *("--disk-write-rate", "0"),
            ],
            log=self._logs / f"server-{self._starts}.log",
        )
        args = ["--max-model-len", str(sizes.max_model_len)]
        if sizes.engine_blocks is not None:
            args += ["--num-gpu-blocks-override", str(sizes.engine_blocks)]
        # A step's blocks are offered together, and puts may pin a quarter of the pool.
        args += ["--max-num-batched-tokens", "1024"]
        # Registered before the start, so that an interrupt in between stops it too.
        self._running.callback(self._server.stop)
        with step("starting the cache server"):
            self._server.start()
        self.client = RemoteClient(ClientConfig(self._server.endpoint, client_name="observer"))
        self._running.callback(self.client.close)
        engine = VllmServer(
            self.model,
            connector=self._connector(),
            args=args,
            log=self._logs / f"engine-{self._starts}.log",
        )
        self._running.callback(engine.stop)
        with step("starting the engine"):
            engine.start()
        self.endpoint = Endpoint(engine.url)
        with step("warming up"):
            # The first long step is slow, and so is the first short one behind a cached prefix.
            # Neither stores blocks below the engine's own cache.
            prompt = tiny_model.prompt_tokens(sizes.max_model_len // 4, seed=987)
            for _ in range(2):
                self.endpoint.first_token(self.model, prompt, extra=_OPT_OUT)

    def _connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "KVFerryConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "server": self._server.endpoint,
                "cpu_pool": self._sizes.pool_bytes,
                "break_even": False,  # a model this small may compute faster than it loads
                **_PATIENT,
            },
        }
