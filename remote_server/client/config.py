"""Settings of a client, with their limits."""

from dataclasses import dataclass

from remote_server.errors import ConfigError
from remote_server.protocol import MAX_LANES
from remote_server.values import MiB, check_endpoint

TRANSPORTS = ("auto", "tcp", "shm")


@dataclass(frozen=True)
class ClientConfig:
    """Address of the server, and limits of the traffic to and from it."""

    endpoint: str
    """`tcp://host:port`. The server need not exist yet."""

    keys: str = ""
    """A client key file, made by `remote_server.keys`, for a server that has keys. Read once."""

    server_name: str = ""
    """The name that a list of servers gives this one. A server of another name is not used. Empty:
    any name."""

    fleet_digest: str = ""
    """The digest of that list. The server then sends its load and marks hot blocks. Empty: there is
    no list."""

    client_name: str = ""
    """Shown by the server's stats next to the namespaces this client declared."""

    transport: str = "auto"
    """Transport of rows in the registered region. `auto`: shared memory when the server is on this
    host and accepts the region, else tcp. `shm`: shared memory only. `tcp`: as if nothing was
    registered. All other rows use tcp."""

    lanes: int = 2
    """TCP connections for blocks beside the ZeroMQ ones, where the server offers them. Rows that
    shared memory does not reach travel there, at about twice the speed. 0: none, all blocks are
    payload of ZeroMQ messages."""

    get_window_bytes: int = 16 * MiB
    """Limit of bytes requested and not received, over all gets over ZeroMQ. Nothing else bounds
    the client's socket queue (`connection/connection.py`); a slow reader's other bytes wait in the
    server's store."""

    get_window_blocks: int = 256
    """The same in blocks, each of which may be a message."""

    put_window_bytes: int = 32 * MiB
    """Limit of bytes sent and not acknowledged, over all puts over ZeroMQ."""

    batch_bytes: int = 4 * MiB
    """Approximate size of one Get or Put over ZeroMQ; at least one block."""

    shared_window_bytes: int = 64 * MiB
    """Limit over shared memory of bytes leased and not copied yet, and again of bytes offered and
    not copied by the server yet. Each is at most a sixteenth of the server's memory, because the
    server cannot evict these blocks meanwhile. A message costs as much as copying one or two MiB,
    and covers half of this."""

    lane_window_bytes: int = 128 * MiB
    """Limit over lanes of bytes requested and not received, and again of bytes offered and not
    acknowledged. A server with little memory or `max_inflight` has a lower one. A message costs as
    much as moving a MiB. It covers a third of this, a quarter for puts, or less so that a short
    transfer uses all lanes."""

    max_control_in_flight: int = 64
    """Small requests in flight at once; further ones wait here, with their deadlines running."""

    integrity: bool = True
    """Hash every row before it is put, so that the server can check what landed, and every block
    received before it is a hit. Turn it off only to measure its cost."""

    quiet: bool = False
    """Log the server's availability at debug level only: the owner logs it instead."""

    keep_freed_memory: bool = True
    """Let this process reuse the memory it frees (`remote_server/allocator.py`): gets of large
    blocks are two to three times as fast, and up to 256 MiB stay with the process after a burst."""

    breaker_timeouts: int = 3
    """Timeouts in a row after which the server counts as unavailable."""

    breaker_backoff_s: float = 0.25
    breaker_longest_backoff_s: float = 2.0
    """With `hello_timeout_s` and `longest_reconnect_s` it bounds the delay until a returned server
    is used."""

    hello_timeout_s: float = 1.0

    reconnect_s: float = 0.05
    """Pause between two attempts to connect; doubles up to `longest_reconnect_s`."""

    longest_reconnect_s: float = 1.0

    heartbeat_s: float = 2.0
    """Pause between two ZMTP pings on a connection without blocks; four without a reply end it."""

    idle_close_s: float | None = None
    """None: a connection for each kind of traffic from the start. A number: those for puts, gets
    and messages of shared memory open at the first transfer and close when idle for so long.
    `ready` then depends on the connection for small requests alone. A stall does not count the time
    to connect, a deadline does; neither counts it as the server's silence."""

    @property
    def in_fleet(self) -> bool:
        """The client asks for the server's load, and for hot keys."""
        return bool(self.fleet_digest)

    def __post_init__(self) -> None:
        if self.idle_close_s is not None and not self.idle_close_s > 0:
            raise ConfigError(f"idle_close_s: {self.idle_close_s!r} must be greater than 0")
        for name in (
            "get_window_bytes", "get_window_blocks", "put_window_bytes", "batch_bytes",
            "shared_window_bytes", "lane_window_bytes",
            "max_control_in_flight", "breaker_timeouts", "breaker_backoff_s",
            "breaker_longest_backoff_s", "hello_timeout_s", "reconnect_s", "longest_reconnect_s",
            "heartbeat_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} must be greater than 0")
        if not 0 <= self.lanes <= MAX_LANES:
            raise ConfigError(f"lanes: {self.lanes!r} must be 0 to {MAX_LANES}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"transport: {self.transport!r} is none of {', '.join(TRANSPORTS)}")
        check_endpoint(self.endpoint, "endpoint")
