"""`POST /locate`: the readable prefix of a prompt in each namespace, for routers.

The admin thread makes the keys; the server's loop finds their tiers, a part in each turn.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from remote_server.located import Prefix, joined, prefix_of
from remote_server.prompt_keys import GroupKeys, Recipe, recipe_of
from remote_server.protocol import MAX_KEYS_PER_MESSAGE, NamespaceStats, read_key
from remote_server.server.tenant.tenant import Tenant
from remote_server.turns import LOOKUP_KEYS_PER_STEP, parts

MAX_TOKENS = 1 << 20
MAX_BODY_BYTES = 8 << 20
"""A token takes up to seven characters of JSON, a hash 67."""

HELP = 'send {"tokens": [NUMBER, ...]} or {"hashes": [HEX, ...]}, and {"namespace": NAME} for one'

Ask = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function on the server's loop."""

Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class LocateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, by its tokens or by the hashes of its blocks, the first one first."""

    tokens: Annotated[list[Token], msgspec.Meta(max_length=MAX_TOKENS)] | None = None
    hashes: Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS_PER_MESSAGE)] | None = None
    namespace: str | None = None


def read_request(body: bytes) -> tuple[LocateRequest, list[bytes]]:
    """The request, and its hashes as bytes. Raises `ValueError` with the reason."""
    try:
        wanted = msgspec.json.decode(body, type=LocateRequest)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if (wanted.tokens is None) == (wanted.hashes is None):
        raise ValueError("exactly one of the two")
    return wanted, [*map(read_key, wanted.hashes or ())]


async def locate(
    wanted: LocateRequest,
    hashes: Sequence[bytes],
    known: Mapping[str, NamespaceStats],
    tenants: Mapping[str, Tenant],
    ask: Ask,
) -> dict[str, dict[str, Any]]:
    """By namespace the prefix of the prompt; those without its first block are left out. `known`
    are all namespaces of the server, by their full names."""
    by_recipe: dict[Recipe, list[str]] = {}
    for name, stats in known.items():
        if wanted.namespace in (None, name) and (recipe := recipe_of(stats.fingerprint)):
            by_recipe.setdefault(recipe, []).append(name)
    found: dict[str, Prefix] = {}
    for recipe, names in by_recipe.items():
        here = recipe.hashes(wanted.tokens) if wanted.tokens is not None else hashes
        groups = recipe.keys(here)
        for name in names:
            found[name] = await _prefix_in(name, groups, tenants, ask)
    return {
        name: {"tokens": prefix.tokens, "tiers": prefix.by_tier}
        for name, prefix in found.items()
        if prefix.tokens
    }


async def _prefix_in(
    name: str, groups: Sequence[GroupKeys], tenants: Mapping[str, Tenant], ask: Ask
) -> Prefix:
    tenant = next((one for one in tenants.values() if name.startswith(one.full_name(""))), None)
    if tenant is None:
        return Prefix(0, {})
    own = name.removeprefix(tenant.full_name(""))
    of_groups = []
    for group in groups:
        places = b""
        for part in parts(group.keys, LOOKUP_KEYS_PER_STEP):
            more: bytes = await ask(partial(tenant.store.gets.locate, own, part))
            places += more
            if 0 in more:  # behind it nothing is of the prefix
                break
        places = places.ljust(len(group.keys), b"\0")
        of_groups.append((group, joined(len(places), [(tenant.store.tier_stack.names, places)])))
    return prefix_of(of_groups)
