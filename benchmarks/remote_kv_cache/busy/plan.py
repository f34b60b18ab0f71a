"""The plan of `test_busy`: its engines, cells and prompts, from the options."""

import argparse
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.engine.driver import Request
from benchmarks.engine.presets import SHAPES
from benchmarks.engine.prompts import check_length, distinct
from benchmarks.harness import options
from benchmarks.remote_kv_cache.busy.results import NONE, OFF, ON, Key
from examples import tiny_model
from remote_server.errors import ConfigError
from remote_server.values import GiB, MiB

BLOCK_TOKENS = 32

WARM = 4
"""The number of prompts that each engine computes first."""

_CONNECTORS = {"on": ON, "off": OFF}

Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Lengths are tokens, memory is bytes. The numbers alone determine the prompts."""

    model: str
    input_len: int
    output_len: int
    depths: Sequence[int]
    step_ms: Sequence[float]
    new_between: int
    break_even: Sequence[str]
    max_num_seqs: int
    max_num_batched_tokens: int
    cpu_pool: int
    kv_cache: int
    rounds: int
    """Warm-ups included."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Plan":
        """From the options. Raises `ConfigError` for numbers that would measure something else."""
        names = {field.name for field in dataclasses.fields(cls)} - {"rounds"}
        given = {name: getattr(arguments, name) for name in names}
        plan = cls(**given, rounds=arguments.trials + arguments.warm_ups)
        plan.check()
        return plan

    def check(self) -> None:
        """Raises `ConfigError`; see `of`."""
        check_length(self.input_len, BLOCK_TOKENS)
        if not self.blocks:
            raise ConfigError(f"--input-len {self.input_len}: no complete block of {BLOCK_TOKENS}")
        longest = max(self.depths) * (1 + self.new_between) * self.blocks
        if self.pool_rows < longest:
            raise ConfigError(
                f"--cpu-pool has {self.pool_rows:,} rows, and the deepest queue has {longest:,}: "
                "the pool would be measured; a larger pool or a shorter queue is needed"
            )
        needed = self.max_num_seqs * self.max_model_len // BLOCK_TOKENS
        if self.kv_cache // self.row_bytes < needed:
            raise ConfigError(
                f"--kv-cache has {self.kv_cache // self.row_bytes:,} blocks, and "
                f"{self.max_num_seqs} requests at a time need {needed:,}"
            )

    @property
    def row_bytes(self) -> int:
        return SHAPES[self.model].block_bytes(BLOCK_TOKENS)

    @property
    def blocks(self) -> int:
        """Complete rows of a prompt."""
        return self.input_len // BLOCK_TOKENS

    @property
    def pool_rows(self) -> int:
        return self.cpu_pool // self.row_bytes

    @property
    def max_model_len(self) -> int:
        """In whole blocks."""
        return -(-(self.input_len + self.output_len) // BLOCK_TOKENS) * BLOCK_TOKENS

    @property
    def engines(self) -> list[str]:
        """The engines, first the one without a connector, the base of comparison."""
        return [NONE, *(_CONNECTORS[which] for which in self.break_even)]

    def keys(self, step_ms: float) -> list[Key]:
        """The cells with steps of this length, grouped by engine."""
        return [Key(step_ms, depth, engine) for engine in self.engines for depth in self.depths]

    def held(self, key: Key, turn: int) -> list[Request]:
        """The queue of a cell: equal for all engines, different in every round."""
        return distinct(key.depth, self.input_len, self._seed(key, turn), self.output_len)

    def new(self, key: Key, turn: int) -> list[Request]:
        """The new prompts in between. They differ by engine, because all engines put their blocks
        on one server."""
        seed = self._seed(key, turn) + 1_000_000 * (1 + self.engines.index(key.engine))
        return distinct(key.depth * self.new_between, self.input_len, seed, self.output_len)

    def _seed(self, key: Key, turn: int) -> int:
        cell = self.step_ms.index(key.step_ms) * len(self.depths) + self.depths.index(key.depth)
        return 1 + turn * len(self.step_ms) * len(self.depths) + cell

    def all_held(self) -> list[Request]:
        """The prompts that the server must hold before the measurement."""
        return [
            request
            for turn in range(self.rounds)
            for step_ms in self.step_ms
            for depth in self.depths
            for request in self.held(Key(step_ms, depth, NONE), turn)
        ]

    def fillers(self) -> list[Request]:
        """Prompts that evict all others from the pool and from the engine's own cache."""
        rows = max(self.pool_rows, self.kv_cache // self.row_bytes)
        return distinct(rows // self.blocks + 2, self.input_len, 900_000_000, 1)

    def warm(self, engine: str) -> list[Request]:
        """An engine's first prompts, which pay the costs of the first use."""
        return distinct(WARM, self.input_len, 910_000_000 + self.engines.index(engine), 2)

    @property
    def server_memory(self) -> int:
        """Memory for all puts of the run, and a quarter more."""
        connectors = len(self.break_even)
        asked = sum(self.depths) * len(self.step_ms) * self.rounds
        prompts = asked * (1 + self.new_between * connectors) + WARM * connectors
        prompts += len(self.fillers())
        return prompts * self.blocks * self.row_bytes * 5 // 4 + 64 * MiB

    @property
    def needed_bytes(self) -> int:
        return self.server_memory + len(self.engines) * (self.cpu_pool + self.kv_cache + 2 * GiB)


def parser(module: str) -> argparse.ArgumentParser:
    """The common flags, and one for each number of a plan."""
    made = options.parser(module, "what the cache gives on a busy engine", trials=1, warm_ups=0)
    made.add_argument(
        "--model", choices=sorted(tiny_model.PRESETS), default="small",
        help="the model, made on the spot (default: %(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--models", type=Path, default=Path(".cache/models"), metavar="DIR",
        help="the folder of models (default: %(default)s)",
    )  # fmt: skip

    def add(name: str, kind: Callable[[str], object], default: object, what: str) -> None:
        made.add_argument(
            name, type=kind, default=default, metavar="N", help=f"{what} (default: %(default)s)"
        )

    add("--depths", several(options.positive), "4,8,16", "held prompts that are sent at once")
    add("--step-ms", several(not_negative), "0,50,500", "the least time of a step; 0: full speed")
    add("--new-between", whole, 1, "new prompts behind each prompt that the server holds")
    add("--break-even", several(_connector), "off,on", "the engines with a connector")
    add("--input-len", options.positive, 769, "tokens of each prompt")
    add("--output-len", options.positive, 3, "tokens of each answer")
    add("--max-num-seqs", options.positive, 4, "requests that an engine runs at a time")
    add("--max-num-batched-tokens", options.positive, 512, "the most tokens that a step computes")
    add("--cpu-pool", options.size, "160MiB", "each connector's CPU pool")
    add("--kv-cache", options.size, "64MiB", "each engine's own KV cache")
    return made


def several(kind: Callable[[str], Value]) -> Callable[[str], tuple[Value, ...]]:
    """Values with commas between them, each once."""

    def read(text: str) -> tuple[Value, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text} has a value twice")
        return values

    return read


def not_negative(text: str) -> float:
    """0, or a number above it."""
    return 0.0 if text.strip() in ("0", "0.0") else options.above_zero(text)


def whole(text: str) -> int:
    """0, 1, 2 …"""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _connector(text: str) -> str:
    if text not in _CONNECTORS:
        raise argparse.ArgumentTypeError(f"{text} is neither on nor off")
    return text
