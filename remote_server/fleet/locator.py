"""Locator: where the blocks of a prompt are, on one cache server or on several. For routers.

    with Locator("tcp://10.0.0.7:5757") as locator:
        found = locator.locate(tokens=token_ids)
        best = max(found.namespaces.values(), key=lambda prefix: prefix.tokens, default=None)

It makes the keys from the tokens, once for each way in which the engines of the servers make keys,
and asks every server at once. A server that does not answer costs only what it holds.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from remote_server.client import ClientConfig
from remote_server.errors import LocalProtocolError
from remote_server.fleet.each import EachServer
from remote_server.fleet.server_list import read_list
from remote_server.located import Prefix, joined, prefix_of
from remote_server.prompt_keys import GroupKeys, Recipe, recipe_of

RECIPES_S = 10.0
"""How long the declarations of engines are taken as known: an engine starts in minutes."""

CONNECT_S = 2.0


@dataclass
class Locations:
    """The answer of all servers."""

    namespaces: dict[str, Prefix] = field(default_factory=dict)
    """By namespace, as far as some block of the prompt is there."""

    failed: dict[str, str] = field(default_factory=dict)
    """Servers without an answer, by name, each with the reason. Their blocks are missing above."""


class Locator:
    """Connections to all servers of a list. For one thread: a call waits for the servers."""

    def __init__(
        self,
        server: str | Sequence[str],
        *,
        client_name: str = "router",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server` is written as the connector's setting. Raises `ConfigError`."""
        servers = read_list(server)
        first = servers.members[0]
        config = ClientConfig(endpoint=first.endpoint, keys=first.keys, client_name=client_name)
        self._servers = EachServer(servers, config)
        self._clock = clock
        self._recipes: dict[str, Recipe] = {}
        self._recipes_until_s = float("-inf")

    def locate(
        self,
        *,
        tokens: Sequence[int] | None = None,
        hashes: Sequence[bytes] | None = None,
        namespace: str | None = None,
        timeout_s: float = 1.0,
    ) -> Locations:
        """The readable prefix of a prompt, given as `tokens` or as the block `hashes` of an engine,
        in `namespace` or in all. A namespace whose engines did not declare how they make keys is
        left out. Raises `LocalProtocolError` unless one of the two is given."""
        if (tokens is None) == (hashes is None):
            raise LocalProtocolError("give tokens or hashes")
        found = Locations()
        wanted = self._recipes_of(namespace, timeout_s, found)
        for recipe, names in wanted.items():
            known = recipe.hashes(tokens) if tokens is not None else (hashes or ())
            groups = recipe.keys(known)
            for name in names:
                self._locate(name, groups, timeout_s, found)
        return found

    def _recipes_of(
        self, namespace: str | None, timeout_s: float, found: Locations
    ) -> dict[Recipe, list[str]]:
        """The namespaces that make keys in one way, for each way."""
        if self._clock() >= self._recipes_until_s:
            self._servers.wait_until_ready(CONNECT_S)
            replies = self._servers.stats(timeout_s, fingerprints=True)
            found.failed |= replies.failed
            declared = {
                name: recipe
                for reply in replies.received.values()
                for name, stats in reply.namespaces.items()
                if (recipe := recipe_of(stats.fingerprint)) is not None
            }
            self._recipes = declared
            if replies.received:
                self._recipes_until_s = self._clock() + RECIPES_S
        wanted: dict[Recipe, list[str]] = {}
        for name, recipe in self._recipes.items():
            if namespace in (None, name):
                wanted.setdefault(recipe, []).append(name)
        return wanted

    def _locate(
        self, namespace: str, groups: Sequence[GroupKeys], timeout_s: float, found: Locations
    ) -> None:
        keys = [key for group in groups for key in group.keys]
        if not keys:
            return
        replies = self._servers.ask(
            lambda one: one.locate(keys, namespace=namespace, timeout_s=timeout_s), timeout_s
        )
        found.failed |= replies.failed
        answers = [
            (one.tiers, one.namespaces[namespace])
            for one in replies.received.values()
            if namespace in one.namespaces
        ]
        places = joined(len(keys), answers)
        first, of_groups = 0, []
        for group in groups:
            of_groups.append((group, places[first : first + len(group.keys)]))
            first += len(group.keys)
        if (prefix := prefix_of(of_groups)).tokens:
            found.namespaces[namespace] = prefix

    def close(self) -> None:
        """End the connections. Idempotent."""
        self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
