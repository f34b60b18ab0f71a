"""Facts that decide: all but those that never change the bytes of a block, named here once more."""

from kv_connector.config_facts import SETTINGS
from kv_connector.namespace import ENGINE_FACTS, namespace_of

UNDECISIVE = {"model_name", "hash_algo", "hash_seed", "multimodal.mm_hasher_algorithm"}


def test_every_other_fact_changes_the_namespace():
    settings = {f"{part}.{name}" for part, of in SETTINGS.items() for name in of.fields}
    known = {*ENGINE_FACTS, *settings, "attention", "device"}
    assert known >= UNDECISIVE
    apart = {
        name for name in known if namespace_of("m", {name: "a"}) != namespace_of("m", {name: "b"})
    }
    assert known - apart == UNDECISIVE
