"""Engines that differ in anything that matters miss each other."""

from types import SimpleNamespace
from typing import Any

import pytest

from kv_connector.identity.namespace import bare_facts, namespace_of
from remote_server.errors import ConfigError
from remote_server.protocol import MAX_NAMESPACE_CHARS

FACTS = {"model": "m", "dtype": "bf16", "hash_algo": "sha256", "hash_seed": "0"}


def test_a_namespace_is_short_and_readable_whatever_the_label():
    name = namespace_of("my model/with ünusual*chars" * 20, FACTS)
    assert name.isprintable() and " " not in name
    assert len(name) <= MAX_NAMESPACE_CHARS


def offloading_config(**changes: Any) -> Any:
    parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1)
    values: dict[str, Any] = {
        "model": SimpleNamespace(name="m", dtype="bfloat16"),
        "kv_cache_layout": "LBHNC",
        "cache": SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=32),
        "groups": (SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("l0",)),),
        "worker_kv_bytes_per_block": 4096,
        "canonical_layout": False,
        "parallel": parallel,
    }
    return SimpleNamespace(**(values | changes))


def test_a_bare_tier_needs_the_operators_namespace_and_says_what_it_cannot_see():
    with pytest.raises(ConfigError, match=r"'namespace'.*revision.*quantization.*LoRA"):
        bare_facts(offloading_config(), "")


def test_a_bare_tier_refuses_a_model_whose_rows_nothing_clears():
    group = SimpleNamespace(group_id=0, tokens_per_block=32, layer_names=("l0",))
    with pytest.raises(ConfigError, match="2 KV cache groups; use KVFerryConnector"):
        bare_facts(offloading_config(groups=(group, group)), "mine")


def test_a_bare_tier_tells_apart_what_it_can_see():
    def named(user: str = "mine", **changes: Any) -> str:
        return namespace_of(*bare_facts(offloading_config(**changes), user))

    assert named() == named()
    different = [
        named("yours"),
        named(kv_cache_layout="BLHNC"),
        named(worker_kv_bytes_per_block=8192),
        named(model=SimpleNamespace(name="m", dtype="float16")),
        named(parallel=SimpleNamespace(tp_size=2, pp_size=1, pcp_size=1, dcp_size=1)),
    ]
    assert len({named(), *different}) == 6
