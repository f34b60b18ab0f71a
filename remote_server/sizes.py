"""Sizes and numbers, as people write and read them."""

import re
from fractions import Fraction
from typing import Annotated

import msgspec

from remote_server.errors import ConfigError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"[ \t]*([0-9]{1,18})(\.[0-9]{1,18})?[ \t]*([a-zA-Z]*)[ \t]*")

# Limit of sizes in files and messages: 63 bits.
MOST_BYTES = 1 << 63


def parse_bytes(value: int | str, setting: str = "size") -> int:
    """`"512MiB"`, `"1GB"`, `"1073741824"` or an int, as bytes. KiB is 1024, kB is 1000. A part of a
    byte, as in 1.1GiB, is dropped; 1.5 bytes are no size.

    Raises `ConfigError` naming `setting` and the value.
    """
    match = _SIZE.fullmatch(str(value))
    unit = _UNITS.get(match[3].lower()) if match else None
    if match is None or unit is None or (match[2] and unit == 1):
        raise ConfigError(
            f"{setting}: {value!r:.80} is not a size; write it like 512MiB, 4GiB or 1073741824"
        )
    num_bytes = int(Fraction(match[1] + (match[2] or "")) * unit)
    if num_bytes >= MOST_BYTES:
        raise ConfigError(f"{setting}: {value!r:.80} is more than there can be")
    return num_bytes


def format_bytes(count: int) -> str:
    """1.5 GiB: for people; one decimal."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


Size = Annotated[int, msgspec.Meta(ge=0)]
"""Bytes; an operator may write `8GiB`."""


# Beyond any count here, and within 64 bits.
MOST_DIGITS = 18

_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def whole_number(value: object) -> int:
    """An int as it is, or its decimal digits. Raises `ValueError` for anything else: text with
    other digits or underscores, a fraction, a boolean, more than `MOST_DIGITS` digits."""
    if isinstance(value, str) and _WHOLE.fullmatch(value) and len(value) <= MOST_DIGITS + 1:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**MOST_DIGITS:
        return value
    raise ValueError("not a whole number")


def finite_number(value: object) -> float:
    """A number as it is, or its decimal text. Raises `ValueError` for anything else: nan, inf,
    other digits, underscores, a boolean. A negative zero is zero."""
    if isinstance(value, str) and _DECIMAL.fullmatch(value):
        value = float(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(whole_number(value))
    if not isinstance(value, float) or not abs(value) < float("inf"):
        raise ValueError("not a finite number")
    return value + 0.0
