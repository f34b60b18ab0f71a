"""No field of vLLM's config is overlooked: each is a fact, seen in one, or listed as harmless."""

import dataclasses
import re
from collections.abc import Iterator

import pytest
import vllm.config
import vllm.envs
from vllm.config import VllmConfig
from vllm_fields import HARMLESS, HARMLESS_VARIABLES, SEEN_IN

from kv_connector.config_facts import ENVIRONMENT, SETTINGS
from kv_connector.namespace import ENGINE_FACTS

WORKER_FACTS = ("attention", "device")

# Config classes that are no field of `VllmConfig` itself.
BELOW = ("MultiModalConfig",)


def config_classes() -> Iterator[type]:
    yield VllmConfig
    for field in dataclasses.fields(VllmConfig):
        for kind in re.findall(r"\w+Config\b", str(field.type)):
            # QuantizationConfig stands for `quant_config`, which is no dataclass.
            if dataclasses.is_dataclass(found := getattr(vllm.config, kind, None)):
                yield found
    for kind in BELOW:
        yield getattr(vllm.config, kind)


def settings_of(kind: str) -> set[str]:
    return {name for chosen in SETTINGS.values() if chosen.kind == kind for name in chosen.fields}


@pytest.mark.parametrize("kind", list(config_classes()), ids=lambda kind: kind.__name__)
def test_every_field_is_a_fact_or_has_a_reason_why_it_is_none(kind: type):
    fields = {field.name for field in dataclasses.fields(kind)}
    if kind is VllmConfig:
        by_class = {name for name in fields if name.endswith("_config")}
        fields -= by_class - {"additional_config", "quant_config"}
    name = kind.__name__
    facts = settings_of(name)
    explained = set(SEEN_IN.get(name, {})) | set(HARMLESS.get(name, {}))
    rest = "*" in explained
    named = explained - {"*"}
    assert not facts & named, "a fact that is also explained away"
    assert not set(SEEN_IN.get(name, {})) & set(HARMLESS.get(name, {})) - {"*"}, "both"
    assert (facts | named) <= fields, "explains a field that vLLM no longer has"
    if not rest:
        assert fields <= facts | named, "decide for each: does it change what KV bytes mean?"


def test_every_class_that_is_explained_is_one_of_vllms():
    classes = {kind.__name__ for kind in config_classes()}
    assert set(SEEN_IN) | set(HARMLESS) <= classes
    assert {chosen.kind for chosen in SETTINGS.values()} <= classes


def test_what_a_field_is_seen_in_is_a_fact():
    seen_in = {fact for fields in SEEN_IN.values() for fact in fields.values()}
    assert seen_in <= {*ENGINE_FACTS, *WORKER_FACTS}


# What a variable is called that changes numbers or where they lie.
SOUNDS = re.compile(
    r"QUANT|PRECISION|FP4|FP8|BF16|A16|INT4|INT8|SCALE|LAYOUT|E8M0|INVARIANT|ACCUM|DTYPE|PARTITION"
)


def test_every_variable_that_sounds_as_if_it_changed_values_is_a_fact_or_has_a_reason():
    known = set(vllm.envs.environment_variables)
    explained = {*ENVIRONMENT, *HARMLESS_VARIABLES}
    assert explained <= known
    assert not set(ENVIRONMENT) & set(HARMLESS_VARIABLES)
    assert {name for name in known if SOUNDS.search(name)} <= explained
