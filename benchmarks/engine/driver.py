"""What a benchmark asks of an engine, and what the engine tells.

A benchmark is written against the protocol `Engine` and the values here, so that it does not
matter whether vLLM or something else computes. An engine goes through

    start → run, counters, settle, forget, limit_step … → restart → … → stop

and is a context manager: however the block ends, no process of it is left. It serves one caller;
nothing here is safe to call from two threads. Lengths are tokens, sizes bytes, times seconds.

The three levels that a prompt's tokens can come from, fast to large:

    engine   the engine's own prefix cache
    pool     the host's CPU pool
    server   the remote cache server

What an implementation must hold to:

- Greedy: the same prompt gets the same tokens, and exactly `max_tokens` of them.
- `run` hands over each request when it is due (`at_s` after the call), never holds one back, and
  returns when the last has ended. Puts to the server may go on; `settle` waits for them.
- `Answer.cached` says where the tokens of this one prompt really came from, as the engine itself
  counts it and not as the benchmark expects it; the rest was computed.
- `counters` only grow between `start` and `stop`, and begin at 0 after a `restart`.
- `restart` keeps nothing of the engine's cache and pool. The server is not the engine's.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

LEVELS = ("engine", "pool", "server")
DIRECTIONS = ("engine_to_pool", "pool_to_engine", "pool_to_server", "server_to_pool")


class EngineFailed(RuntimeError):
    """The engine did not start, ended, or could not do what it was asked. It is of no use any
    more: stop it. The message is for people, and ends with the log where there is one."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with. Engines to be compared differ in as little as possible."""

    model: str
    """A directory, or a name that vLLM knows how to find."""

    kv_bytes_per_token: int
    """All layers, keys and values. vLLM finds it out for itself; the caller does arithmetic."""

    max_model_len: int
    max_batched_tokens: int
    """Most tokens that one step computes. `limit_step` lowers it while the engine runs."""

    max_num_seqs: int
    block_tokens: int = 32
    engine_cache: bool = True
    """Whether the engine keeps a prefix cache of its own. Keys of blocks are made either way."""

    engine_blocks: int | None = None
    """Blocks of the engine's KV cache; None leaves it to vLLM."""

    connector: Mapping[str, Any] | None = None
    """Settings of the connector, `kv_connector_extra_config`. None: an engine without one.
    Without `server` in it, the CPU pool works alone."""

    async_scheduling: bool = False
    """Schedule a step while the one before it is computed. `start` raises `Skipped` where vLLM
    does not."""

    watch: bool = False
    """Keep when the worker computed and copied, for `take_spans`, and time the connector's hooks.
    Costs some ten microseconds a step."""

    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """More of vLLM's engine arguments, by their Python names. They win."""

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes_per_token

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that this engine has."""
        has = {
            "engine": self.engine_cache,
            "pool": self.connector is not None,
            "server": self.connector is not None and "server" in self.connector,
        }
        return tuple(level for level in LEVELS if has[level])


class Request(msgspec.Struct, frozen=True):
    """One prompt. `at_s`: when it arrives, after the beginning of the batch. `params`: what the
    client sends as `kv_transfer_params`."""

    prompt: Sequence[int]
    max_tokens: int
    at_s: float = 0.0
    params: Mapping[str, Any] | None = None


class Answer(msgspec.Struct, frozen=True):
    """What became of one request. Both times are since it arrived, so waiting for others counts."""

    prompt_tokens: int
    cached: dict[str, int]
    """Prompt tokens by level; a level that gave none is there with 0."""

    first_token_s: float
    total_s: float
    tokens: list[int]

    @property
    def computed(self) -> int:
        """Tokens of the prompt that no level had."""
        return self.prompt_tokens - sum(self.cached.values())


class Batch(msgspec.Struct, frozen=True):
    """What became of the requests of one `run`, in their order."""

    answers: list[Answer]
    seconds: float
    """From the call until the last answer was complete."""

    steps: int
    hooks_s: dict[str, float] = msgspec.field(default_factory=dict)
    """Seconds that the scheduler's thread spent in the connector: in `ours`, in `vLLM's` own
    offloading, and, of both, `waiting`. Empty without `watch` or without a connector."""

    @property
    def requests_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def cached(self) -> dict[str, int]:
        """Prompt tokens of all requests, by level."""
        return {level: sum(answer.cached[level] for answer in self.answers) for level in LEVELS}

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self.answers)


class Counters(msgspec.Struct, frozen=True):
    """What moved between levels since the start, in bytes and, where known, seconds of copying."""

    engine_to_pool: int = 0
    pool_to_engine: int = 0
    pool_to_server: int = 0
    server_to_pool: int = 0
    engine_to_pool_s: float = 0.0
    pool_to_engine_s: float = 0.0
    hook_errors: int = 0
    """Exceptions of the connector that were kept from the engine. Anything but 0 is a bug."""

    @property
    def moved(self) -> dict[str, int]:
        """The bytes, by direction."""
        return {name: getattr(self, name) for name in DIRECTIONS}

    def since(self, before: "Counters") -> "Counters":
        """What was counted between `before` and now."""
        return Counters(
            *(getattr(self, name) - getattr(before, name) for name in self.__struct_fields__)
        )


class Span(msgspec.Struct, frozen=True):
    """Something that a worker did, on the machine's monotonic clock."""

    what: str
    """`compute`: a step of the model; `store`, `load`: one copy between engine and pool."""

    began_s: float
    ended_s: float
    num_bytes: int = 0
    running_s: float = 0.0
    """Of it, how long the thread had a core."""


class Engine(Protocol):
    """One engine; see the module for what its implementations promise. `EngineFailed` from any."""

    settings: EngineSettings

    def start(self) -> Self:
        """Return when requests can be run, with the server in reach if there is one."""
        ...

    def run(self, requests: Sequence[Request]) -> Batch:
        """Answer all of them."""
        ...

    def counters(self) -> Counters: ...

    def settle(self, timeout_s: float = 60.0) -> float:
        """Return once no copy and no put is under way, with the seconds that took. What was put
        deferred may then not be readable yet: ask the server."""
        ...

    def forget(self, *, pool: bool = False) -> None:
        """Empty the engine's own prefix cache, and with `pool` the CPU pool. Settles first.
        A connector's namespace at the server changes with its pool's: see ARCHITECTURE.md, epochs.
        """
        ...

    def limit_step(self, tokens: int) -> None:
        """From now on a step computes at most `tokens`, up to `max_batched_tokens`."""
        ...

    def take_spans(self) -> list[Span]:
        """What the worker did since the last call; empty without `watch`."""
        ...

    def restart(self) -> None:
        """Stop and start: cache and pool are empty, counters at 0."""
        ...

    def stop(self) -> None:
        """End it. Doing so again does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
