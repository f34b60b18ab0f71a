"""Checks of the rows, keys and namespace of a request."""

from collections.abc import Sequence
from operator import attrgetter

from remote_server import protocol
from remote_server.errors import LocalProtocolError


def check_keys(keys: Sequence[bytes]) -> None:
    """Raise `LocalProtocolError` when the protocol cannot carry one of `keys`."""
    # A pass over all in C: most requests have uniform keys.
    if {*map(type, keys)} <= {bytes}:
        lengths = {*map(len, keys)}
        if not lengths or 0 < min(lengths) <= max(lengths) <= protocol.MAX_KEY_BYTES:
            return
    for number, key in enumerate(keys):
        if not isinstance(key, bytes) or not 0 < len(key) <= protocol.MAX_KEY_BYTES:
            raise LocalProtocolError(
                f"key {number} is not 1 to {protocol.MAX_KEY_BYTES} bytes: {key!r:.80}"
            )


def check_namespace(namespace: str) -> None:
    """Raise `LocalProtocolError` when the protocol cannot carry `namespace`."""
    try:
        fits = 0 < len(namespace) <= protocol.MAX_NAMESPACE_CHARS
        namespace.encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise LocalProtocolError(f"namespace {namespace!r:.80}: {error}") from error
    if not fits:
        raise LocalProtocolError(
            f"namespace {namespace!r:.80} must be 1 to {protocol.MAX_NAMESPACE_CHARS} characters"
        )


def check_rows(
    keys: Sequence[bytes], rows: Sequence[memoryview], block_bytes: int, *, writable: bool
) -> list[memoryview]:
    """`rows` as flat byte views of our own, which a caller cannot release. Raises
    `LocalProtocolError` when they cannot be transferred."""
    check_keys(keys)
    if len(keys) != len(rows):
        raise LocalProtocolError(f"{len(keys)} keys with {len(rows)} rows")
    if _are_flat(rows, block_bytes, writable=writable):
        return [memoryview(row) for row in rows]
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


_shape = attrgetter("format", "ndim", "c_contiguous", "readonly")
_WRITABLE, _READ_ONLY = ("B", 1, True, False), ("B", 1, True, True)


def _are_flat(rows: Sequence[memoryview], block_bytes: int, *, writable: bool) -> bool:
    """Whether all rows can be transferred as they are. Checks each in C."""
    if not {*map(type, rows)} <= {memoryview}:
        return False
    try:
        shapes = {*map(_shape, rows)}
        sizes = {row.nbytes for row in rows}
    except ValueError:  # one of them has been released
        return False
    fit = shapes <= ({_WRITABLE} if writable else {_WRITABLE, _READ_ONLY})
    return fit and (not sizes or 0 < min(sizes) <= max(sizes) <= block_bytes)
