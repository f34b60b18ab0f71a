"""Parts of replies that describe a server and its blocks."""

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from remote_server.histograms import Timings
from remote_server.protocol.limits import ShortText


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """Occupancy of one tier. `blocks` are the readable ones, `pending` those being written."""

    budget_bytes: int
    used_bytes: int
    blocks: int
    pending: int
    pinned: int
    free_slabs: int
    kept: int = 0
    """Those of `pinned` that an operator pinned."""
    evicted_age_s: float = -1.0
    """How long ago the block that was evicted last had been used; -1: none was evicted, or the tier
    does not measure it."""


class ServerLoad(msgspec.Struct, array_like=True, frozen=True):
    """What a client that chooses between servers knows of one."""

    fill: Annotated[int, Meta(ge=0)]
    """Used bytes of the server's own tiers, memory and disk, in thousandths of their budgets."""

    evicted_age_s: float
    """The time since the last use of the block that was evicted last from the lowest of these
    tiers; -1 before the first one. It grows while nothing is evicted."""

    up_s: float
    """The time since the server started."""

    draining: bool = False
    """Puts are declined: the server is about to stop."""


class EngineReport(msgspec.Struct, array_like=True, frozen=True):
    """What an engine reports of itself in its hellos, for people. Nothing depends on it."""

    software: ShortText = ""
    """Such as `vLLM 0.32.0, kvferry 1.2.0`."""

    prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    """Of the requests that it has admitted since its start; 0: it does not count them."""

    reused: Annotated[dict[ShortText, Annotated[int, Meta(ge=0)]], Meta(max_length=8)] = {}
    """Those of `prompt_tokens` that it did not compute, by the level that had them."""

    given_up: Annotated[int, Meta(ge=0)] = 0
    """Blocks that it computed because the answer or the load took longer than it waits."""

    tokens_per_s: Annotated[float, Meta(ge=0.0)] = 0.0
    """How fast it computes prompts; 0: not measured yet."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is connected and has sent a report."""

    namespace: str
    client: str
    model: str
    """As it is called in the facts that the engine declared; empty when they have none."""
    software: str
    prompt_tokens: int
    reused: dict[str, int]
    given_up: int = 0
    tokens_per_s: float = 0.0


class TierShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a namespace in one tier. `blocks` are the readable ones."""

    blocks: int = 0
    used_bytes: int = 0

    @staticmethod
    def sum_of(shares: Collection["TierShare"]) -> "TierShare":
        return TierShare(
            blocks=sum(one.blocks for one in shares),
            used_bytes=sum(one.used_bytes for one in shares),
        )


class NamespaceStats(msgspec.Struct, frozen=True, kw_only=True):
    """`tiers` has every tier of the server; it is empty from one of protocol 1. `fingerprint` and
    `engines` are present when requested."""

    block_bytes: int
    tiers: dict[str, TierShare] = {}
    client: str
    fingerprint: dict[str, str]
    engines: dict[str, dict[str, str]] = {}
    """The engines that declared it, the last one last: their differences from `fingerprint`."""
    forgotten: bool = False
    """It was declared, and the server no longer knows the values and the engines."""

    def share(self, tier: str) -> TierShare:
        return self.tiers.get(tier, TierShare())

    @property
    def total(self) -> TierShare:
        """A block that is in several tiers counts in each."""
        return TierShare.sum_of(self.tiers.values())


class BlockCopy(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of a block, for people."""

    tier: str
    where: str = ""
    """Its file or its object there; empty in memory."""
    age_s: float = 0.0
    """Since it was written; 0 in memory."""


class EvictionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Eviction that learns, of one tenant: the rule that reigns in its tiers, and the reasons."""

    rule: str
    """`lru` or `learned`."""
    switches: int
    found: dict[str, float]
    """By rule: the share of sampled keys that its shadow found of late. They decide."""
    policy_bytes: int
    """Memory that the policy takes beside the index, about."""
    within_s: list[float] = []
    returns: dict[str, list[float]] = {}
    """By class, those that were seen: the chance that a block just used is used again within each
    of `within_s`."""


class FoundAt(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that requests asked for, and what caches of other sizes would have found of them.

    The lists have a share for each of `WhatIf.times`. `rule` is for the rule in force; the share
    at today's size is what was really found.
    """

    asked: int
    found: dict[str, int]
    """By tier: really found there, or in a tier above."""
    rule: dict[str, list[float]]
    lru: dict[str, list[float]]
    missed: dict[str, float] = {}
    """By reason (PROTOCOL.md): shares of the asked tokens that were not found. Together with the
    found ones they are 1."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant's cache would find with other sizes of its tiers, from a sample of its keys."""

    over_s: float
    """The requests of so long before now are counted."""
    times: list[float]
    """Sizes, as multiples of today's."""
    budgets: dict[str, int]
    """Today's sizes in bytes, by tier; without tiers that have no limit."""
    rule: str
    """`learned` or `lru`: the setting."""
    seen_bytes: int
    """Of different blocks that requests asked for, about, and at most the largest size: a larger
    cache could not have held more yet."""
    model_bytes: int
    """Memory that the models take, about."""
    total: FoundAt
    namespaces: dict[str, FoundAt] = {}


class BucketCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind to the object store since the start."""

    results: dict[str, int]
    """How many had each result: `ok`, `existed`, or the reason of their failure."""
    num_bytes: int
    """Of bodies that were sent or came."""
    times: Timings


class BucketStats(msgspec.Struct, frozen=True, kw_only=True):
    """The bucket as one server sees it."""

    paused_s: float
    """For how long it has been left alone because its calls fail; 0: it is called."""
    last_failure: str
    """The last call that failed, its reason, and the words of the store; empty without one."""
    last_failure_s: float
    """The time since then."""
    names: int
    """Packs that are known to be there."""
    packs_waiting: int
    """Packs that wait to be written."""
    writable_bytes: int | None
    """What the write rate allows now; None: it has no limit."""
    calls: dict[str, BucketCalls]
    """By kind: `put`, `get`, `header`, `head`, `list`, `delete`."""
