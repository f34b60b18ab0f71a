"""The states of keys in several tiers."""

from collections.abc import Callable, Sequence
from typing import Any

from remote_server.protocol import KeyState
from remote_server.store.tier import Tier

Lookup = Callable[[str, Sequence[bytes]], bytes]

_READABLE = bytes([KeyState.READABLE])


def best(lookups: Sequence[Lookup], namespace: str, keys: Sequence[bytes]) -> bytes:
    """The best state of each key by any of `lookups`, of which there is one at least. Further ones
    are not called once all keys are readable."""
    return better(lookups[0](namespace, keys), lookups[1:], namespace, keys)


def better(
    states: bytes, lookups: Sequence[Lookup], namespace: str, keys: Sequence[bytes]
) -> bytes:
    """`states`, or the better one by `lookups`."""
    for lookup in lookups:
        if not states.strip(_READABLE):
            break
        states = bytes(map(max, states, lookup(namespace, keys)))
    return states


def near_and_all(
    memory: Lookup, tiers: Sequence[Tier[Any]], namespace: str, keys: Sequence[bytes]
) -> tuple[bytes, bytes]:
    """The best states without those of `tiers` that are across a network, and with them."""
    near = [memory, *(tier.lookup_all for tier in tiers if not tier.is_remote)]
    remote = [tier.lookup_all for tier in tiers if tier.is_remote]
    states = best(near, namespace, keys)
    return states, better(states, remote, namespace, keys)


def runs_beyond(near: bytes, states: bytes) -> list[int]:
    """Where `states` has readable keys that `near` has not: of each run of them the index of the
    first one, and their number."""
    if near == states:
        return []
    runs: list[int] = []
    end = -1
    for place, (one, other) in enumerate(zip(near, states, strict=True)):
        if other == KeyState.READABLE != one:
            if place == end:
                runs[-1] += 1
            else:
                runs += (place, 1)
            end = place + 1
    return runs
