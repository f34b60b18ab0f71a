"""What a client's body may hold under `kv_transfer_params`: any shape, any type, any text.

No hook raises, no text becomes the label of a metric, and what cannot be read keeps the request
from the server. vLLM's own scheduler half reads the same parameters behind ours.
"""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_connector import BLOCK, empty_step, request_of
from scripted_client import ScriptedClient

from kv_connector.connector import KVFerryConnector
from kv_connector.hooks.kept_back import OLD_KV
from kv_connector.identity.adapters import AdapterState
from kv_connector.request_options import HINT_NAMES, BadHint, Bypass, bypass_of
from kv_connector.tier import metrics
from kv_connector.tier.lookup_state import Missed

pytest_plugins = ["fuzzing"]

WORDS = (
    *("kvferry", "kvferry_bypass", "load", "store", "max_load_tokens", "max_offload_tokens"),
    *("kv_load_tiers", "medium", "locality", "cpu", "remote", "lora", "options_unread"),
)

texts = st.text(max_size=12) | st.sampled_from(WORDS)
numbers = (
    st.integers(-(2**63), 2**64 - 1)  # vLLM refuses a body with larger ones
    | st.floats()
    | st.sampled_from([0, -1, 1, 31, 33])
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=12,
)
options = st.dictionaries(
    st.sampled_from(["load", "store", "returns", "within_s", "other"]), st.booleans() | values
)
bodies = values | st.fixed_dictionaries(
    {},
    optional={
        "kvferry": options | values,
        "kvferry_bypass": values,
        "max_load_tokens": numbers | values,
        "max_offload_tokens": numbers | values,
        "kv_load_tiers": st.lists(st.dictionaries(texts, values, max_size=3), max_size=3) | values,
    },
)

ADAPTER = SimpleNamespace(lora_name="a", lora_path="/none")


def test_no_body_raises_in_a_hook_or_names_a_metric(
    hybrid: KVFerryConnector, fuzz: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kv_connector.request_options.logger.warning", lambda *_: None)
    tier: Any = hybrid._remote
    tier.declare("model", {"model": "m"})
    client = ScriptedClient.latest
    count = 0

    @given(bodies, st.booleans(), st.sampled_from([None, 16, 32, 48, 80, 96]))
    def serve(body: Any, adapter: bool, boundary: int | None) -> None:
        nonlocal count
        count += 1
        name = f"request {count}"
        request: Any = request_of(hybrid, name, 3 * BLOCK + 5, json.loads(json.dumps(body)))
        request.lora_request = ADAPTER if adapter else None
        client.asked.clear()
        hybrid.on_new_request(request)
        assert request.kv_transfer_params is None or isinstance(request.kv_transfer_params, dict)
        bypass = bypass_of(request.kv_transfer_params)
        assert (bypass is not None) == (adapter or not readable(body))
        hybrid.get_num_new_matched_tokens(request, 0)
        status = hybrid.scheduler._req_status[name]
        status.update_block_id_groups(([1, 2, 3, 4], [0, 0, 0, 5]))
        hybrid.build_connector_meta(
            empty_step({} if boundary is None else {name: [(1, 6, boundary)]})
        )
        store_a_row(hybrid, status)
        assert not (bypass and client.asked), "a request that must not use the server used it"
        hybrid.request_finished(request, [])
        hybrid.reset_cache()
        hybrid.get_kv_connector_stats()

    fuzz.run(serve, examples=25)
    known = {name for kind in (Missed, Bypass, BadHint, AdapterState) for name in map(str, kind)}
    known |= {OLD_KV, "", "unavailable", "pinned_rows", "draining", "partial_block", "failed"}
    known |= {*client.counters(), *metrics.INTEGRITY_REASONS.values()}
    assert {label for _, label in tier.counters.totals()} <= known
    assert not [key for key in tier.counters.totals() if key[0] == metrics.HOOK_ERRORS]


def store_a_row(connector: KVFerryConnector, status: Any) -> None:
    """Offer a row of this request to the tier, as the tiering manager does after the copy."""
    manager: Any = connector.scheduler.manager
    prepared = manager.prepare_store(status.group_states[0].offload_keys[:1], status.req_context)
    manager.complete_store(prepared.keys_to_store, status.req_context)


def readable(body: Any) -> bool:
    """Whether our part of a body is what the documentation has."""
    if not isinstance(body, dict):
        return body is None
    ours = body.get("kvferry")
    if ours is None:
        return True
    return isinstance(ours, dict) and all(
        name in HINT_NAMES or (name in ("load", "store") and isinstance(allowed, bool))
        for name, allowed in ours.items()
    )
