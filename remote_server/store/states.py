"""The states of keys in several tiers."""

from collections.abc import Callable, Sequence

from remote_server.protocol import KeyState

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
