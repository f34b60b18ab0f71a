"""The example of prefill and decode apart is one that vLLM and kvferry accept."""

import json
from pathlib import Path
from types import SimpleNamespace

from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector

from kv_connector import register
from kv_connector.config import ConnectorConfig, read_config
from kv_connector.connector import KVFerryConnector

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "prefill_decode"


def config() -> KVTransferConfig:
    register()
    return KVTransferConfig(**json.loads((FOLDER / "kv_transfer.json").read_text()))


def test_vllm_finds_nixl_first_and_kvferry_second():
    engine = SimpleNamespace(kv_transfer_config=config())
    found = MultiConnector._get_connector_classes_and_configs(engine)
    assert [kind for kind, _ in found] == [NixlConnector, KVFerryConnector]


def test_kvferry_accepts_its_settings():
    _, ours = config().kv_connector_extra_config["connectors"]
    settings = ours["kv_connector_extra_config"]
    assert read_config(ConnectorConfig, settings, "example").server == settings["server"]


def test_hybrid_models_stay_possible_and_the_layouts_agree():
    assert MultiConnector.all_children_support_hma(config())
    engine = SimpleNamespace(
        kv_transfer_config=config(),
        model_config=SimpleNamespace(use_mla=False, pooler_config=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        parallel_config=SimpleNamespace(
            distributed_executor_backend="mp", use_ray=False, nnodes_within_dp=1
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    assert MultiConnector.get_required_kvcache_layout(engine) == "LBHNC"
