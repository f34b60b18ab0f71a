"""JSON lines of a trace, decoded into the fields of a format; defects become sentences."""

import re
from typing import TypeVar

import msgspec

_Fields = TypeVar("_Fields", bound=msgspec.Struct)

_KINDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
    "array": "a list of whole numbers", "object": "an object", "null": "null",
}  # fmt: skip
_MISSING = re.compile(r"Object missing required field `([^`]*)`")
_WRONG = re.compile(r"Expected `([^`]*)`, got `([^`]*)` - at `\$\.([^`[]*)")
_RANGE = re.compile(r".* out of range.*- at `\$\.([^`[]*)")


def decode(line: str, kind: type[_Fields]) -> _Fields:
    """Raises `ValueError` with a sentence about the line."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(_sentence(f"{error}")) from None
    except RecursionError:
        raise ValueError("no JSON: nested too deeply") from None


def fields_of(line: str) -> dict[str, object] | None:
    """Those of a JSON object; None for any other line."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _sentence(error: str) -> str:
    if missing := _MISSING.match(error):
        return f"there is no {missing[1]}"
    if wrong := _WRONG.match(error):
        expected, got = (_KINDS.get(each.split(" ")[0], each) for each in wrong.group(1, 2))
        return f"{wrong[3]} has {got}, not {expected}"
    if out := _RANGE.match(error):
        return f"{out[1]} has a number that is too large"
    if error.startswith("Expected `object`"):
        return "no JSON object"
    return f"no JSON: {error}"
