"""Numbers as operators write them: digits of ASCII, finite, and nothing that Python alone reads."""

import re

# Beyond any count of anything here, and within 64 bits.
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
