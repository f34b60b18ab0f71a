"""Names of objects: tenant, namespace, partition and key of each pack."""

import re
from typing import NamedTuple

import xxhash

ROOT = "v1"

PARTITIONS = 256

_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.@+")
_ESCAPED = re.compile("=([0-9A-F]{2})")


def pack_id(namespace: str, key: bytes) -> int:
    """64 bits that stand for a pack's name, where a set of all names is kept. The first eight are
    its partition."""
    name = xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(namespace.encode()))
    return _partition(key) << 56 | name >> 8


def ids_in(partitions: range) -> tuple[int, int]:
    """The lowest and the highest `pack_id` in `partitions`, which are neighbours."""
    return partitions[0] << 56, (partitions[-1] + 1 << 56) - 1


def tenant_prefix(tenant: str) -> str:
    """The folder of all objects of `tenant`, which is empty without tenants."""
    return f"{ROOT}/{escaped(tenant)}"


def prefix_of(tenant: str, namespace: str | None) -> str:
    """The folder of all packs of one namespace, or of all of `tenant`."""
    prefix = tenant_prefix(tenant)
    return prefix if namespace is None else f"{prefix}/{escaped(namespace)}"


def partition_of(key: bytes) -> str:
    """Two hexadecimal digits: object stores limit requests for each prefix."""
    return f"{_partition(key):02x}"


def _partition(key: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key) % PARTITIONS


def object_name(tenant: str, namespace: str, key: bytes) -> str:
    """The name of the pack whose last row has `key`."""
    return f"{prefix_of(tenant, namespace)}/{partition_of(key)}/{key.hex()}"


class Named(NamedTuple):
    """What the name of an object means."""

    tenant: str
    namespace: str
    key: bytes


def parse_name(name: str) -> Named | None:
    """The inverse of `object_name`; None for an object that is not a pack."""
    parts = name.split("/")
    if len(parts) != 5 or parts[0] != ROOT:
        return None
    try:
        named = Named(unescaped(parts[1]), unescaped(parts[2]), bytes.fromhex(parts[4]))
    except ValueError:
        return None
    return named if object_name(*named) == name else None


def escaped(text: str) -> str:
    """`text` as one part of an object's name, in characters that no store changes."""
    if not text or text.strip(".") == "":
        return "=" + "".join(f"={byte:02X}" for byte in text.encode())
    return "".join(
        each if each in _PLAIN else "".join(f"={byte:02X}" for byte in each.encode())
        for each in text
    )


def unescaped(part: str) -> str:
    """The inverse of `escaped`. Raises `ValueError`."""
    if part.startswith("="):
        part = part[1:] if part == "=" or part.startswith("==") else part
    found = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), part)
    return found.encode("latin-1").decode()
