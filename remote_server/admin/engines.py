"""The engines of a server as its page shows them: what each runs, finds, and cannot share."""

from collections.abc import Mapping
from typing import Any

import msgspec

from remote_server.protocol import EngineState, NamespaceStats
from remote_server.protocol.namespace_diff import gaps_of
from remote_server.server.reports.snapshot import Snapshot

MOST_ENGINES = 50
MOST_COMPARED = 32
"""Namespaces that each engine is compared with, those with most blocks: every look at the page
costs so many comparisons for each engine."""


def described(snapshot: Snapshot) -> list[dict[str, Any]]:
    """The first `MOST_ENGINES`, each with the lines that `kvferry why` would have."""
    known = snapshot.namespaces
    fullest = sorted(known, key=lambda name: known[name].total.blocks, reverse=True)
    compared = {name: known[name] for name in fullest[:MOST_COMPARED]}
    return [_described(one, known, compared) for one in snapshot.engines[:MOST_ENGINES]]


def _described(
    engine: EngineState,
    known: Mapping[str, NamespaceStats],
    compared: Mapping[str, NamespaceStats],
) -> dict[str, Any]:
    own = known.get(engine.namespace)
    facts = own.fingerprint | own.engines.get(engine.client, {}) if own is not None else {}
    beside = {**compared, **({engine.namespace: own} if own is not None else {})}
    gaps = gaps_of(engine.namespace, engine.client, facts, beside) if facts else []
    return {
        **msgspec.structs.asdict(engine),
        "why": [gap.line() for gap in gaps],
    }
