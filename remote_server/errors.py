"""All errors of this project, as one tree ordered by the caller's reaction.

    KVFerryError
    ├── ConfigError               an operator must change something; raised at start-up
    ├── ServerFailed              the server has ended, with exit status 1: start it again
    ├── ProtocolError
    │   ├── LocalProtocolError    this side built an invalid message: a bug on this side
    │   └── RemoteProtocolError   the peer sent an invalid message: answer or drop it, keep serving
    ├── RequestRefused            the server understood and refused; `code` has the reason
    ├── MoverFull                 too many jobs have not been reaped: submit it again later
    ├── MoverClosed               the mover was closed, or is the parent process's: make another
    ├── LaneBroken                the lane takes no jobs any more: use another one
    ├── TlsFailed                 a connection cannot be encrypted: do without it
    │   └── WrongCertificate      the server is not the right one, or its certificate is new
    ├── ServerUnavailable         unreachable, draining or closed: count it, treat it as a miss
    │   └── NamespaceRefused      it does not take these blocks; waiting does not help
    └── DeadlineExceeded          too slow to be worth it: recompute
        └── Stalled               nothing came at all: wait for nothing until something comes

The loss of the cache never fails a request: the last three become misses where the engine meets the
cache (`kv_connector/tier/remote_tier.py`) and are counted there by reason.
"""

from remote_server.plain_text import plain


class KVFerryError(Exception):
    """Root of the tree; it covers every error of this project and no other."""


class ConfigError(KVFerryError):
    """A setting is unknown, malformed or impossible here. Names the setting and the value."""


class ServerFailed(KVFerryError):
    """The server could not go on, and has ended. No block of its disk or bucket is lost."""


class ProtocolError(KVFerryError):
    """A message does not follow PROTOCOL.md."""


class LocalProtocolError(ProtocolError):
    """This side built a message that the protocol forbids. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that the protocol forbids."""


class RequestRefused(KVFerryError):
    """The server answered with an `Error` message.

    `code` is one of `protocol.ErrorCode`'s values; retrying unchanged will not help.
    """

    def __init__(self, code: str, message: str) -> None:
        # The server quotes text of its peers, and this goes into logs and terminals.
        super().__init__(plain(f"{message} [{code}]"))
        self.code = code
        self.message = message


class MoverFull(KVFerryError):
    """The mover has as many jobs as it may have. The job was not submitted."""


class MoverClosed(KVFerryError):
    """The mover was closed, or it belongs to the process that this one was forked from."""


class LaneBroken(KVFerryError):
    """The lane is broken, closed or unknown. The job was not submitted."""


class TlsFailed(KVFerryError):
    """A connection of a lane could not be encrypted."""


class WrongCertificate(TlsFailed):
    """The server showed another certificate than the pinned one."""

    def __init__(self) -> None:
        super().__init__("the server shows another certificate than the pinned one")


class ServerUnavailable(KVFerryError):
    """No server can be reached now. The client keeps reconnecting by itself."""


class NamespaceRefused(ServerUnavailable):
    """The server refuses this client's namespace. The client asks again now and then."""


class DeadlineExceeded(KVFerryError):
    """The reply did not come within the time that it is worth."""


class Stalled(DeadlineExceeded):
    """Nothing came for a get, for as long as its caller waits."""
