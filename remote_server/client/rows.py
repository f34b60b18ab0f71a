"""Keys and rows as callers hand them over, checked before anything is sent.

Done on the I/O thread: a caller's mistake comes back through its future like everything else.
"""

from collections.abc import Sequence

from remote_server import protocol
from remote_server.errors import LocalProtocolError


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `LocalProtocolError` when one of `keys` is nothing the protocol can name."""
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or not 0 < len(key) <= protocol.MAX_KEY_BYTES:
            raise LocalProtocolError(
                f"key {number} is not 1 to {protocol.MAX_KEY_BYTES} bytes: {key!r:.80}"
            )


def check_rows(
    keys: Sequence[bytes], rows: Sequence[memoryview], block_bytes: int, *, writable: bool
) -> list[memoryview]:
    """`rows` as flat byte views. Raises `LocalProtocolError` when they cannot be transferred."""
    check_keys(keys)
    if len(keys) != len(rows):
        raise LocalProtocolError(f"{len(keys)} keys with {len(rows)} rows")
    flat = []
    for number, row in enumerate(rows):
        try:
            view = memoryview(row).cast("B")
        except (TypeError, ValueError) as error:
            raise LocalProtocolError(f"row {number} is not contiguous bytes: {error}") from error
        if not 0 < view.nbytes <= block_bytes:
            raise LocalProtocolError(
                f"row {number} holds {view.nbytes} bytes, declared were 1 to {block_bytes}"
            )
        if writable and view.readonly:
            raise LocalProtocolError(f"row {number} cannot be written")
        flat.append(view)
    return flat
