"""Models that need every token of a prompt computed are refused: a loaded prefix spoils them."""

from types import SimpleNamespace

import pytest

from kv_connector.connector import KVFerryConnector
from kv_connector.vllm import refusals
from kv_connector.vllm.refusals import refuse_whole_prompts
from remote_server.errors import ConfigError


def config(
    *, mla: bool = False, chunked: bool = False, caches: bool = False, pooler: object = None,
    supported: bool = True,
) -> SimpleNamespace:  # fmt: skip
    model = SimpleNamespace(
        use_mla=mla, pooler_config=pooler, is_prefix_caching_supported=supported
    )
    parallel = SimpleNamespace(
        distributed_executor_backend="mp", use_ray=False, nnodes_within_dp=1, world_size=1
    )
    return SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=caches),
        parallel_config=parallel,
    )


@pytest.fixture
def on(monkeypatch):
    def on(device: str) -> None:
        platform = SimpleNamespace(is_cpu=lambda: device == "cpu")
        monkeypatch.setattr(refusals, "current_platform", platform)

    return on


REFUSED = [
    (config(mla=True), "its answers would be wrong"),
    (config(pooler="MEAN", supported=False, chunked=True, caches=True), "pools all tokens"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED)
def test_what_vllm_itself_keeps_from_prefixes_is_refused(on, given, why):
    """vLLM turns its own prefix caching off for these, and still asks a connector for prefixes."""
    on("cpu")
    for refuse in (refuse_whole_prompts, KVFerryConnector.get_required_kvcache_layout):
        with pytest.raises(ConfigError, match=why):
            refuse(given)


@pytest.mark.parametrize(
    ("device", "given"),
    [
        ("cpu", config()),
        ("cpu", config(mla=True, chunked=True, caches=True)),
        ("cpu", config(mla=True, chunked=True)),
        ("cuda", config(mla=True)),
        ("cuda", config(pooler="LAST")),
        ("cpu", config(supported=False)),
    ],
)
def test_others_may_load_prefixes(on, device, given):
    on(device)
    refuse_whole_prompts(given)
    refuse_whole_prompts(SimpleNamespace(**vars(given) | {"model_config": None}))
