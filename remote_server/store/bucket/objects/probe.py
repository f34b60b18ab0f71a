"""Probe of a bucket: whether its credential may list, write, read and remove, each by itself."""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.packs.object_names import ROOT

_CONTENT = b"kvferry doctor"

# Beside the tenants' folders: no list, sweep or clear of a server meets it.
FOLDER = f"{ROOT}/=probe"


class Probed(NamedTuple):
    """The result of one kind of call."""

    call: str
    """`list`, `write`, `read` or `delete`."""
    name: str
    """The object that it was tried with."""
    failure: Failure | None = None
    words: str = ""
    """Why it failed, and the words of the store."""


def probe(objects: Objects) -> Iterator[Probed]:
    """Try each kind of call with an object of its own, and remove that. Ends early where the store
    does not answer: every further call would take as long."""
    name = f"{FOLDER}/{secrets.token_hex(8)}"
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: next(iter(objects.listing(FOLDER)), None),
        "write": partial(objects.put, name, memoryview(_CONTENT)),
        "read": partial(_read, objects, name),
        "delete": partial(objects.remove, [name]),
    }
    is_written = False
    for call, act in calls.items():
        try:
            act()
        except BucketError as error:
            if call == "read" and not is_written and error.failure is Failure.ABSENT:
                continue  # the store has answered, and has nothing there
            yield Probed(call, name, error.failure, str(error))
            if error.failure in (Failure.UNREACHABLE, Failure.TIMEOUT):
                return
        else:
            is_written |= call == "write"
            yield Probed(call, name)


def _read(objects: Objects, name: str) -> None:
    found = bytes(objects.read(name, 0, len(_CONTENT)))
    if found != _CONTENT:
        raise BucketError(Failure.OTHER, "other bytes than those that were written")
