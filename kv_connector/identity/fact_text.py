"""Text of a fact's value, equal in every process for equal values.

A value whose text would contain an address, and a function without a name, have no such text. They
raise `NotKnown`, because a guess could join two different models.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import PurePath
from typing import Any

from remote_server.plain_text import forbidden_in

# A longer value becomes its digest. `kvferry why` prints shorter ones.
_READABLE_CHARS = 120


class NotKnown(Exception):
    """A fact that this engine cannot establish. The message is the reason."""


def text_of(value: Any) -> str:
    """The value of a fact: readable when short and printable, else a digest. Raises `NotKnown`."""
    plain = _plain(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)
    readable = len(text) <= _READABLE_CHARS and not forbidden_in(text)
    return text if readable else digest_of(text)


def digest_of(value: Any) -> str:
    """32 hexadecimal digits of a value, whatever its length. Raises `NotKnown`."""
    text = json.dumps(_plain(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """`value` as JSON types, without addresses."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if isinstance(value, Sequence):
        return value.hex() if isinstance(value, bytes) else [_plain(item) for item in value]
    return _plain_object(value)


def _plain_object(value: Any) -> Any:
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    if callable(getattr(value, "to_dict", None)):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__qualname__, **entries}
    if callable(getattr(value, "compute_hash", None)):
        return value.compute_hash()
    name = getattr(value, "__qualname__", None)
    if name is not None and "<" not in name:
        return f"{value.__module__}.{name}"
    raise NotKnown(f"a {type(value).__qualname__} has no text that is equal in every process")
