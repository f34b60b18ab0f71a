"""What vLLM's metric of its configuration has of the tier. vLLM 0.33 and newer ask for it."""

from typing import Any

import pytest
from scripted_client import Engine

from kv_connector.config import RemoteConfig
from kv_connector.tier.config_info import LABELS, config_info
from kv_connector.tier.remote_tier import RemoteTier


def servers(setting: Any) -> Any:
    return config_info(RemoteConfig(server=setting), None, 1)["kvferry_server"]


def test_the_values_have_the_labels_that_were_declared():
    engine = Engine(patience=0.5)
    values = engine.tier.config_info()
    assert tuple(values) == RemoteTier.config_info_keys({}) == LABELS
    assert values["kvferry_server"] == "tcp://127.0.0.1:1"
    assert values["kvferry_patience"] == 0.5
    namespace, _, _ = engine.client.declared[-1]
    assert values["kvferry_namespace"] == namespace


def test_a_namespace_that_is_not_known_is_an_empty_label():
    assert Engine(declared=False).tier.config_info()["kvferry_namespace"] == ""


def test_no_setting_is_left_out_unseen():
    """A new one is a label too, or is named here."""
    settings = {f"kvferry_{name}" for name in RemoteConfig.__struct_fields__}
    assert settings | {"kvferry_block_bytes"} == {*LABELS}


@pytest.mark.parametrize(
    ("setting", "label"),
    [
        ("tcp://10.0.0.7:5757?keys=/etc/secret.key", "tcp://10.0.0.7:5757"),
        (["tcp://a:1?keys=/etc/secret.key", "tcp://b:2"], "tcp://a:1,tcp://b:2"),
        ("tcp://h-{0..9}:1", "tcp://h-0:1,tcp://h-1:1,tcp://h-2:1,tcp://h-3:1 and 6 more"),
    ],
)
def test_the_label_names_servers_without_their_key_files(setting: Any, label: str):
    assert servers(setting) == label


def test_a_list_in_a_file_is_named_by_its_file(tmp_path: Any):
    """It may change, and the label may not."""
    (tmp_path / "servers").write_text("tcp://a:1\n")
    assert servers(f"file://{tmp_path}/servers") == f"file://{tmp_path}/servers"
