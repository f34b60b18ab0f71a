"""The keys of a prompt's blocks, made from its tokens as vLLM's engines make them.

A key is a block hash and the number of its group, four bytes, big-endian. A block hash is that of
the hash before it, the tokens of the block, and None where the block has neither pictures nor an
adapter nor a salt. Engines declare how they make keys, beside the other facts of their namespace.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

# vLLM 0.31 and newer use this seed for SHA-256 where PYTHONHASHSEED is not set.
_DEFAULT_SEED = "vllm-none-hash"

VLLMS_OWN = "vLLM's own"
"""The declared seed of an engine without PYTHONHASHSEED."""

MOST_GROUPS = 64


class Recipe(NamedTuple):
    """How the engines of a namespace make keys from tokens."""

    algorithm: str
    """`sha256` or `sha256_cbor`."""
    seed: str
    tokens_per_hash: int
    groups: tuple[tuple[int, int], ...]
    """Of each group that holds all of a prefix: its number, and the tokens of one of its keys."""

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """The hashes of the whole blocks of a prompt. Each takes about 2 µs."""
        serialize, size = _SERIALIZERS[self.algorithm], self.tokens_per_hash
        parent = hashlib.sha256(serialize(self.seed)).digest()
        found = []
        for end in range(size, len(tokens) + 1, size):
            block = serialize((parent, tuple(tokens[end - size : end]), None))
            parent = hashlib.sha256(block).digest()
            found.append(parent)
        return found

    def keys(self, hashes: Sequence[bytes]) -> list["GroupKeys"]:
        """The keys of the blocks with these hashes, of each group."""
        found = []
        for number, num_tokens in self.groups:
            each, suffix = num_tokens // self.tokens_per_hash, number.to_bytes(4, "big")
            keys = [last + suffix for last in hashes[each - 1 :: each]]
            found.append(GroupKeys(num_tokens, keys))
        return found


class GroupKeys(NamedTuple):
    """The keys of one group, in prefix order."""

    tokens_per_key: int
    keys: list[bytes]


def recipe_text(tokens_per_hash: int, groups: Mapping[int, int]) -> str:
    """The declared fact `key_tokens`: tokens of a hash, then the number of each group and the
    tokens of one of its keys."""
    return " ".join([str(tokens_per_hash), *(f"{one}:{size}" for one, size in groups.items())])


def recipe_of(fields: Mapping[str, str]) -> Recipe | None:
    """The recipe in the declared fields of a namespace. None where they have none: an older engine,
    keys that are made otherwise, or fields that make no sense, since any client may declare."""
    algorithm, seed = fields.get("hash_algo", ""), fields.get("hash_seed", "")
    first, *others = fields.get("key_tokens", "").split() or [""]
    if algorithm not in _SERIALIZERS or not others or len(others) > MOST_GROUPS:
        return None
    try:
        size = int(first)
        pairs = [one.partition(":")[::2] for one in others]
        groups = tuple((int(number), int(tokens)) for number, tokens in pairs)
    except ValueError:
        return None
    whole = size > 0 and all(
        0 <= number < 1 << 32 and tokens > 0 and tokens % size == 0 for number, tokens in groups
    )
    seed = _DEFAULT_SEED if seed == VLLMS_OWN else seed
    return Recipe(algorithm, seed, size, groups) if whole else None


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor(value: object) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2.1) of the types that keys are made of."""
    return b"".join(_cbor_parts(value))


def _cbor_parts(value: object) -> Iterator[bytes]:
    if value is None:
        yield b"\xf6"
    elif isinstance(value, int):
        yield _cbor_head(0, value)
    elif isinstance(value, bytes):
        yield _cbor_head(2, len(value)) + value
    elif isinstance(value, str):
        yield _cbor_head(3, len(value.encode())) + value.encode()
    elif isinstance(value, tuple):
        yield _cbor_head(4, len(value))
        for each in value:
            yield from _cbor_parts(each)
    else:
        raise TypeError(f"no key is made of {type(value).__name__}")


def _cbor_head(kind: int, number: int) -> bytes:
    """The first bytes of a value: its kind, and a number in as few bytes as hold it."""
    if number < 24:
        return bytes([kind << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([kind << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit in eight bytes")


_SERIALIZERS: Mapping[str, Callable[[object], bytes]] = {"sha256": _pickled, "sha256_cbor": _cbor}
