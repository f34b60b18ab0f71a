"""Puts and gets over shared memory, made from flat fields, and their names as kinds of requests."""

from typing import Any

import msgspec

from remote_server.protocol import Get, Got, LeaseRequest, Put, SharedRows


class SharedPut:
    """A `Put` with `shared`: the name of its kind for rules and records of `FakeServer`."""


class SharedGet:
    """A `Get` with `shared`, likewise."""


_ON_SHARED: dict[type, type] = {Put: SharedPut, Get: SharedGet}


def kind_of(message: Any) -> type:
    on_shared = getattr(message, "shared", None) is not None
    return _ON_SHARED[type(message)] if on_shared else type(message)


def _split(fields: dict[str, Any], part: type) -> tuple[dict[str, Any], Any]:
    """The fields of the message, and the struct `part` made of the others."""
    names = {field.name for field in msgspec.structs.fields(part)}
    own = {name: value for name, value in fields.items() if name not in names}
    return own, part(**{name: value for name, value in fields.items() if name in names})


def shared_put(**fields: Any) -> Put:
    """A put with the fields of `Put` and of `SharedRows`."""
    own, rows = _split(fields, SharedRows)
    return Put(**own, shared=rows)


def shared_get(**fields: Any) -> Get:
    """A get with the fields of `Get` and of `LeaseRequest`."""
    own, terms = _split(fields, LeaseRequest)
    return Get(**own, shared=terms)


def replaced(got: Got, **fields: Any) -> Got:
    """`got` with other values in it, or in its lease."""
    lease = {name: fields.pop(name) for name in ("offsets", "words", "generations", "number")
             if name in fields}  # fmt: skip
    return msgspec.structs.replace(got, **fields, lease=msgspec.structs.replace(got.lease, **lease))
