"""JSON for scripts and for terminals."""

import json
from typing import Any

import msgspec


def ascii_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON of printable ASCII characters, and line breaks where `indent` is given.

    JSON itself allows C1 controls and marks of direction in a text, which a terminal obeys.
    """
    return json.dumps(msgspec.json.decode(msgspec.json.encode(value)), indent=indent)
