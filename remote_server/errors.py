"""Every error this project raises, as one tree that tells the caller what to do.

    KVFerryError
    ├── ConfigError               an operator must change something; raised at start-up
    ├── ProtocolError
    │   ├── LocalProtocolError    we were about to send nonsense: a bug on this side
    │   └── RemoteProtocolError   the peer sent nonsense: answer or drop it, keep serving
    ├── RequestRefused            the server understood and said no; `code` says why
    ├── ServerUnavailable         unreachable, draining or closed: count it, treat it as a miss
    └── DeadlineExceeded          too slow to be worth it: recompute

Losing the cache never fails a request: the last three become misses where the engine meets
the cache (`kv_connector/remote_tier.py`) and are counted there by reason.
"""

from remote_server.plain_text import plain


class KVFerryError(Exception):
    """Root of the tree; catch it to catch everything of ours and nothing else."""


class ConfigError(KVFerryError):
    """A setting is unknown, malformed or impossible here. Names the setting and the value."""


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
        # The server quotes what its peers sent, and this goes into logs and terminals.
        super().__init__(plain(f"{message} [{code}]"))
        self.code = code
        self.message = message


class ServerUnavailable(KVFerryError):
    """No server is there to ask right now. The client keeps reconnecting by itself."""


class DeadlineExceeded(KVFerryError):
    """The answer did not come in the time it was worth waiting for."""


def without_frames(error: KVFerryError | None) -> KVFerryError | None:
    """`error`, fit to be kept in a result: its traceback would keep alive what the frames that
    it passed through were working on, a caller's rows among them."""
    return None if error is None else error.with_traceback(None)
