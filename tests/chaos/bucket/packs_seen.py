"""The packs of a bucket as they are, compared with the bytes of the oracle."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from oracle import MEDIUM, content, key

from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError, Failure, Objects
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.object_names import parse_name
from remote_server.store.bucket.upkeep.sweep import CLOCK


@contextmanager
def bucket_of(url: str, environment: Mapping[str, str]) -> Iterator[Objects]:
    """The objects of a bucket, read by this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield StoreObjects(url)


def packs_of(objects: Objects) -> dict[str, int]:
    """The size of each pack by its name. Nothing else is there but the clock."""
    listed = {one.name: one.num_bytes for chunk in objects.listing("") for one in chunk}
    others = [name for name in listed if parse_name(name) is None and not name.endswith(CLOCK)]
    assert not others, f"no packs: {others}"
    return {name: size for name, size in listed.items() if parse_name(name) is not None}


def look_at(objects: Objects) -> Counter[str]:
    """How many packs are whole and how many are torn. Wrong bytes fail the test."""
    return Counter(_kind_of(objects, name, size) for name, size in packs_of(objects).items())


def _kind_of(objects: Objects, name: str, num_bytes: int) -> str:
    named = parse_name(name)
    assert named is not None
    try:
        data = objects.read(name, 0, num_bytes)
        header = layout.decode_header(data, named.namespace, named.key)
    except layout.PackDamaged:
        return "torn"
    except BucketError as error:
        if error.failure is not Failure.ABSENT:
            raise
        return "gone"
    offsets = [*layout.offsets_of(header, layout.header_bytes_of(data))]
    if offsets[-1] + header.rows[-1].length > len(data):
        return "torn"
    for row, offset in zip(header.rows, offsets, strict=True):
        number = int(row.key.rpartition(b"/")[2])
        assert row.key == key(MEDIUM, number)
        assert data[offset : offset + row.length] == content(MEDIUM, number), f"{name} is wrong"
    return "whole"
