"""The interface of an engine: settings, requests, answers, counters, and the protocol `Engine`.

A benchmark uses only the protocol `Engine` and the values here, so that it does not matter whether
vLLM or something else computes. The life of an engine is

    start → run, counters, settle, forget, limit_step … → restart → … → stop

and is a context manager: however the block ends, all its processes end. It serves one caller;
no method is safe to call from two threads. Lengths are tokens, sizes bytes, times seconds.

A prompt's tokens come from three levels, from fast to large:

    engine   the engine's own prefix cache
    pool     the host's CPU pool
    server   the remote cache server

Duties of an implementation:

- Greedy: the same prompt gets the same tokens, and exactly `max_tokens` of them.
- `run` submits each request when it is due (`at_s` after the call), never delays one, and
  returns when the last has ended. Puts to the server may continue; `settle` waits for them.
- `Answer.cached` gives the true origin of this prompt's tokens, as the engine itself counts it
  and not as the benchmark expects it; the rest was computed.
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
    """The engine did not start, ended, or could not carry out an order. It is unusable: stop it.
    The message is for display, and ends with the log where there is one."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine's start. Engines under comparison differ in as few as possible."""

    model: str
    """A directory, or a name that vLLM resolves."""

    kv_bytes_per_token: int
    """All layers, keys and values. Used in the caller's arithmetic; vLLM computes its own."""

    max_model_len: int
    max_batched_tokens: int
    """The most tokens that one step computes. `limit_step` lowers it while the engine runs."""

    max_num_seqs: int
    block_tokens: int = 32
    engine_cache: bool = True
    """Whether the engine has a prefix cache of its own. Keys of blocks are made either way."""

    engine_blocks: int | None = None
    """Blocks of the engine's KV cache; None: vLLM's choice."""

    connector: Mapping[str, Any] | None = None
    """Settings of the connector, `kv_connector_extra_config`. None: an engine without a connector.
    Without `server`, the CPU pool works alone."""

    async_scheduling: bool = False
    """Schedule a step while the one before it is computed. `start` raises `Skipped` where vLLM
    cannot."""

    watch: bool = False
    """Record when the worker computed and copied, for `take_spans`, and time the connector's
    hooks. Costs some ten microseconds a step."""

    extra: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """More of vLLM's engine arguments, by their Python names. They take precedence."""

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
    """One prompt. `at_s`: its arrival after the beginning of the batch. `params`: the client's
    `kv_transfer_params`."""

    prompt: Sequence[int]
    max_tokens: int
    at_s: float = 0.0
    params: Mapping[str, Any] | None = None


class Answer(msgspec.Struct, frozen=True):
    """The result of one request. Both times count from its arrival, waiting included."""

    prompt_tokens: int
    cached: dict[str, int]
    """Prompt tokens by level; a level that gave none has 0."""

    first_token_s: float
    total_s: float
    tokens: list[int]

    @property
    def computed(self) -> int:
        """Tokens of the prompt found on no level."""
        return self.prompt_tokens - sum(self.cached.values())


class Batch(msgspec.Struct, frozen=True):
    """The results of the requests of one `run`, in their order."""

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
    """Bytes moved between levels since the start and, where known, seconds of copying."""

    engine_to_pool: int = 0
    pool_to_engine: int = 0
    pool_to_server: int = 0
    server_to_pool: int = 0
    engine_to_pool_s: float = 0.0
    pool_to_engine_s: float = 0.0
    hook_errors: int = 0
    """Exceptions of the connector that the engine did not see. Any value above 0 is a bug."""

    @property
    def moved(self) -> dict[str, int]:
        """The bytes, by direction."""
        return {name: getattr(self, name) for name in DIRECTIONS}

    def since(self, before: "Counters") -> "Counters":
        """The counts between `before` and now."""
        return Counters(
            *(getattr(self, name) - getattr(before, name) for name in self.__struct_fields__)
        )


class Span(msgspec.Struct, frozen=True):
    """One activity of a worker, on the machine's monotonic clock."""

    what: str
    """`compute`: a step of the model; `store`, `load`: one copy between engine and pool."""

    began_s: float
    ended_s: float
    num_bytes: int = 0
    running_s: float = 0.0
    """The part of it in which the thread had a core."""


class Engine(Protocol):
    """One engine; the module states its duties. Every method may raise `EngineFailed`."""

    settings: EngineSettings

    def start(self) -> Self:
        """Return when requests can run, connected to the server if there is one."""
        ...

    def run(self, requests: Sequence[Request]) -> Batch:
        """Answer all of them."""
        ...

    def counters(self) -> Counters: ...

    def settle(self, timeout_s: float = 60.0) -> float:
        """Return once no copy and no put is in flight, with the seconds that took. A deferred put
        may not be readable yet: query the server."""
        ...

    def forget(self, *, pool: bool = False) -> None:
        """Empty the engine's own prefix cache, and with `pool` the CPU pool. Settles first.
        A connector's namespace at the server changes with its pool's: see ARCHITECTURE.md, epochs.
        """
        ...

    def limit_step(self, tokens: int) -> None:
        """A step from now on computes at most `tokens`, up to `max_batched_tokens`."""
        ...

    def take_spans(self) -> list[Span]:
        """The worker's activity since the last call; empty without `watch`."""
        ...

    def restart(self) -> None:
        """Stop and start: cache and pool are empty, counters at 0."""
        ...

    def stop(self) -> None:
        """End it. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
