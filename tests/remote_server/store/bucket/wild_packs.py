"""Packs whose headers have wild fields and the right checksum, drawn as small programs."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import strategies as st
from mutations import Step

from remote_server import protocol
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.codecs import ZSTD, codec_named
from remote_server.store.bucket.packs.layout import COMPRESSED, PLAIN
from remote_server.store.pages import PAGE, padded

NAMESPACE = "ns"
ROWS, LENGTH, BLOCK_BYTES = 4, 5_000, 8_192

VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 4095, 4096, LENGTH, LENGTH + 1, BLOCK_BYTES, BLOCK_BYTES + 1, 1 << 16, 1 << 31,
    (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None, True, 0.5, "", "ns",
    "other", "x" * 3000, "zstd", "none", "lz4", b"", b"key", bytes(129), b"\xff" * 9000, [], [[]],
    [0], [1, 2, 3, 4], {}, {"a": 1},
)  # fmt: skip
"""Of any field."""


FIELDS = (
    "field",
    "row",
    "row",
    "row",
    "stored",
    "drop",
    "twice",
    "swap",
    "add",
    "add to row",
    "version",
)
BODY = ("cut", "grow", "flip", "swap bodies", "sizes")

_number = st.integers(0, 999)
programs = st.lists(
    st.builds(Step, st.sampled_from(FIELDS + BODY), _number, _number, _number), max_size=3
)


def data_of(key: bytes, is_short: bool) -> bytes:
    """The row that is stored under `key`; a short one is compressed well."""
    noise = random.Random(key)
    return noise.randbytes(100) * (LENGTH // 100) if is_short else noise.randbytes(LENGTH)


def wild_pack(
    keys: Sequence[bytes], strays: Sequence[bytes], program: Sequence[Step], *, compress: bool
) -> bytes:
    """The object of the rows of `keys` after `program`. A row may get the key of a stray."""
    rows = [data_of(key, compress) for key in keys]
    bodies = rows
    words = [(n << 32 | n + 1, 1 << 32) for n in range(len(keys))]
    fields: list[Any] = [NAMESPACE, BLOCK_BYTES, [
        [key, LENGTH, protocol.checksum(NAMESPACE, key, row), *place]
        for key, row, place in zip(keys, rows, words, strict=True)
    ]]  # fmt: skip
    codec = codec_named(ZSTD) if compress else None
    if codec is not None:
        bodies = [codec.compress(memoryview(row), 1) for row in rows]
        fields += [ZSTD, 1, [*map(len, bodies)]]
    version = PLAIN if codec is None else COMPRESSED
    for step in program:
        if step.what == "version":
            version = (PLAIN, COMPRESSED, 3, 0)[step.a % 4]
        elif step.what in FIELDS:
            _spoil(fields, step, [*keys, *strays])
    body = bytearray(b"".join(each.ljust(padded(len(each)), b"\0") for each in bodies[:-1]))
    body += bodies[-1]
    header = sealed(version, msgspec.msgpack.encode(fields))
    for step in program:
        if step.what in BODY:
            header, body = _spoil_bytes(header, body, step)
    return header + bytes(body)


def sealed(version: int, fields: bytes, num_bytes: int | None = None) -> bytes:
    """The pages of a header with the right checksum, but for those behind its eighth."""
    num_bytes = padded(layout._PREFIX.size + len(fields)) if num_bytes is None else num_bytes
    checksum = layout._checksum(version, num_bytes, fields)
    prefix = layout._PREFIX.pack(layout.MAGIC, version, 0, num_bytes, len(fields), checksum)
    return (prefix + fields).ljust(min(num_bytes, 8 * PAGE), b"\0")


def _spoil(fields: list[Any], step: Step, keys: Sequence[bytes]) -> None:
    what, a, b, c = step
    value = VALUES[c % len(VALUES)] if c < 800 else keys[c % len(keys)]
    rows = fields[2] if len(fields) > 2 and isinstance(fields[2], list) and fields[2] else [[]]
    row = rows[a % len(rows)]
    match what:
        case "field" if fields:
            fields[a % len(fields)] = value
        case "row" if isinstance(row, list) and row:
            row[b % len(row)] = value
        case "stored" if len(fields) > 5 and isinstance(fields[5], list) and fields[5]:
            fields[5][a % len(fields[5])] = value
        case "drop":
            del rows[a % len(rows)]
        case "twice":
            rows.insert(b % len(rows), row)
        case "swap":
            other = b % len(rows)
            rows[a % len(rows)], rows[other] = rows[other], row
        case "add":
            fields += [value] * (1 + b % 3)
        case "add to row" if isinstance(row, list):
            row += [value] * (1 + b % 3)


def _spoil_bytes(header: bytes, body: bytearray, step: Step) -> tuple[bytes, bytearray]:
    what, a, b, c = step
    match what:
        case "cut":
            body = body[: len(body) * a // 1000]
        case "grow":
            body = body + bytes(c * PAGE // 100)
        case "flip" if body:
            body[len(body) * a // 1000] ^= 1 << b % 8
        case "swap bodies":
            body = body[2 * PAGE : 4 * PAGE] + body[: 2 * PAGE] + body[4 * PAGE :]
        case "sizes":  # of the header, with the right checksum
            size = (0, PAGE, 2 * PAGE, 4 * PAGE + 1, 1 << 20, (1 << 32) - 1)[a % 6]
            fields = header[layout._PREFIX.size :][: b * 4]
            header = sealed(PLAIN + a % 2, fields, size)
    return header, body
