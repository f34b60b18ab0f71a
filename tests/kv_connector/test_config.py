"""A wrong setting is reported at start, by name, with its value and the nearest right one."""

from pathlib import Path

import pytest

from kv_connector.config import (
    ConnectorConfig,
    client_config,
    client_configs,
    client_for,
    read_config,
)
from kv_connector.identity.fact_text import digest_of, text_of
from kv_connector.vllm.refusals import refuse_weak_hashes
from remote_server.client import RemoteClient
from remote_server.errors import ConfigError
from remote_server.fleet.fleet import Fleet


def read(**given: object) -> ConnectorConfig:
    return read_config(ConnectorConfig, given, "kv_connector_extra_config")


def test_every_setting_has_a_safe_default():
    config = read()
    assert config.server is None
    assert config.for_vllm()["secondary_tiers"] == []
    assert config.for_vllm()["cpu_bytes_to_use"] == 1 << 30
    assert config.integrity


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("cpu_poll", "cpu_pool"), ("servers", "server"), ("max_wait", "max_wait_ms")],
)
def test_an_unknown_setting_is_refused_and_the_nearest_named(wrong: str, right: str):
    with pytest.raises(ConfigError, match=f"unknown setting '{wrong}'; did you mean '{right}'"):
        read(**{wrong: 1})


@pytest.mark.parametrize(
    "former", ["wait_budget_ms", "lookup_timeout_ms", "load_stall_ms", "load_timeout_ms"]
)
def test_a_former_setting_is_refused_with_the_ones_that_replaced_it(former: str):
    with pytest.raises(ConfigError, match=f"'{former}' was replaced: 'patience' .* 'max_wait_ms'"):
        read(**{former: 100})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("cpu_pool", "a lot"),
        ("blocks_per_row", 0),
        ("max_wait_ms", -1),
        ("server", "localhost"),
        ("server", "tcp://h:1?key=/etc/kvferry/client.key"),
        ("server", "tcp://h:1?keys="),
        ("eviction", "fifo"),
        ("integrity", "yes"),
        ("transport", "rdma"),
        ("window", "12 parsecs"),
        ("window", 0),
        ("window", "0MiB"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_value(setting: str, value: object):
    with pytest.raises(ConfigError) as refused:
        read(**{setting: value})
    assert setting in str(refused.value)
    assert str(value) in str(refused.value)


@pytest.mark.parametrize("setting", ["transport", "patience", "server"])
def test_half_of_a_surrogate_pair_is_refused(setting: str):
    with pytest.raises(ConfigError, match=r"kv_connector_extra_config: "):
        read(**{setting: "\ud800"})


def test_a_key_file_behind_the_address_goes_to_the_client_and_not_into_the_address():
    server = "tcp://10.0.0.7:5757?keys=/etc/kvferry/client.key"
    client = client_config(read(server=server), "engine")
    assert (client.endpoint, client.keys) == ("tcp://10.0.0.7:5757", "/etc/kvferry/client.key")
    assert client_config(read(server="tcp://10.0.0.7:5757"), "engine").keys == ""
    (tier,) = read(server=server).for_vllm()["secondary_tiers"]
    assert tier["server"] == server


def test_answers_are_stored_unless_the_operator_says_otherwise():
    assert read().for_vllm()["offload_prompt_only"] is False
    assert read(store_answers=False).for_vllm()["offload_prompt_only"] is True


OPEN, LOCKED = "tcp://127.0.0.1:5757", "tcp://127.0.0.1:5757?keys=/etc/kvferry/client.key"


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_weak_hash_is_refused_with_a_random_seed_and_always_where_a_server_has_keys(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
):
    """A prompt can forge its keys."""

    def refused_with_keys() -> None:
        for server in (LOCKED, ["tcp://a:5757", "tcp://b:5757?keys=/client.key"]):
            with pytest.raises(ConfigError, match=f"{algorithm} with a server that has keys"):
                refuse_weak_hashes(algorithm, server)

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    refuse_weak_hashes("sha256", OPEN)
    refuse_weak_hashes("sha256_cbor", LOCKED)
    refuse_weak_hashes(algorithm, None)
    refused_with_keys()
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        refuse_weak_hashes(algorithm, OPEN)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    refuse_weak_hashes(algorithm, OPEN)
    refused_with_keys()


@pytest.mark.parametrize("character", ["\n", "\x1b", "\u202e", "\u2028"])
def test_a_namespace_that_no_server_takes_is_refused_and_such_a_fact_has_a_digest(character: str):
    with pytest.raises(ConfigError, match=rf"namespace=.*U\+{ord(character):04X}") as refused:
        read(namespace=f"a{character}")
    assert character not in str(refused.value)
    assert text_of(f"a{character}") == digest_of(f"a{character}")
    assert text_of("a b") == "a b"


# ── several servers ──────────────────────────────────────────────────────────────────────────

RANGE = "tcp://kvferry-{0..2}.kvferry:5757"


@pytest.mark.parametrize("server", [RANGE, [f"tcp://kvferry-{n}.kvferry:5757" for n in range(3)]])
def test_a_range_and_a_list_are_a_fleet_and_one_address_is_one_client(server: str | list[str]):
    client = client_for(read(server=server), "engine")
    assert isinstance(client, Fleet)
    assert client.names == ("kvferry-0", "kvferry-1", "kvferry-2")
    client.close()
    for one in ("tcp://127.0.0.1:1", ["tcp://127.0.0.1:1"]):
        alone = client_for(read(server=one), "engine")
        assert isinstance(alone, RemoteClient)
        alone.close()


def test_a_file_is_a_fleet_even_with_one_line_because_it_may_get_another(tmp_path: Path):
    file = tmp_path / "servers"
    file.write_text("tcp://127.0.0.1:1?name=a\n")
    client = client_for(read(server=f"file://{file}"), "engine")
    assert isinstance(client, Fleet)
    client.close()


def test_the_canary_has_the_address_the_keys_and_the_name_of_each_server():
    settings = read(server=["tcp://b:5757?keys=/b.key", "tcp://a:5757"])
    configs = client_configs(settings, "canary")
    assert list(configs) == ["a", "b"]
    found = {name: (one.endpoint, one.keys, one.server_name) for name, one in configs.items()}
    assert found == {"a": ("tcp://a:5757", "", "a"), "b": ("tcp://b:5757", "/b.key", "b")}
    assert all(one.fleet_digest for one in configs.values())
    (alone,) = client_configs(read(server="tcp://a:5757"), "canary").values()
    assert (alone.server_name, alone.fleet_digest) == ("", "")


def test_a_wrong_server_in_a_list_is_refused_at_start():
    with pytest.raises(ConfigError, match="localhost gives no name"):
        read(server=["tcp://localhost:1", "tcp://a:1"])
