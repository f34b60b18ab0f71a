"""`kv_connector_extra_config` as JSON gives it: settings that can be used, or one sentence."""

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kv_connector.config import ConnectorConfig, client_configs, is_one_server, read_config
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import MOST_MEMBERS

pytest_plugins = ["fuzzing"]

WHERE = "kv_connector_extra_config"

SERVERS = (
    "tcp://a:1", "tcp://b:2?keys=/k", "tcp://c{0..2}:1", "tcp://10.0.0.1:1?name=m", "tcp://a",
    "tcp://:1", "ipc://x", "file:///none", "file://s", "", "tcp://a:" + "9" * 5_000, "tcp://{1..2}",
)  # fmt: skip
WORDS = (
    "auto", "tcp", "shm", "lru", "arc", "16MiB", "1GiB", "-1MiB", "1e3", "0", "9" * 30, "yes",
    "nan", "a\0", "\x1b", "\ud800", "\u2028", *SERVERS,
)  # fmt: skip

texts = st.sampled_from(WORDS) | st.text(max_size=4)
numbers = (
    st.sampled_from([0, 1, -1, 1024, 1025, 600_000, 600_001, 1 << 63, 10**4_000, 1e-320, 0.0])
    | st.integers()
    | st.floats()
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
servers = st.sampled_from(SERVERS) | st.lists(st.sampled_from(SERVERS), max_size=4) | values
names = st.sampled_from([*ConnectorConfig.__struct_fields__, "cpu_poll", "load_timeout_ms", "\n"])
settings = st.builds(
    lambda most, server: most | server,
    st.dictionaries(names, texts | numbers | values, max_size=3),
    st.fixed_dictionaries({}, optional={"server": servers}),
)


def refusal(error: ConfigError) -> None:
    assert str(error).startswith(f"{WHERE}: ")


@given(settings)
def configure(given: Any) -> None:
    given = json.loads(json.dumps(given))
    try:
        config = read_config(ConnectorConfig, given, WHERE)
    except ConfigError as error:
        refusal(error)
        return
    assert all(getattr(config, name) == value for name, value in given.items())
    assert 0 <= config.patience <= 1000
    assert 0 < config.max_wait_ms <= 600_000 and 0 < config.put_timeout_ms <= 600_000
    assert math.isfinite(config.for_vllm()["cpu_bytes_to_use"])
    json.dumps(config.for_vllm(), allow_nan=False).encode()
    if config.server is not None:
        clients = client_configs(config, "engine")
        assert 1 <= len(clients) <= MOST_MEMBERS
        assert is_one_server(config.server) == (len(clients) == 1)
        assert all(0 <= client.get_window_bytes < 1 << 63 for client in clients.values())


def test_settings_of_an_engine_are_checked_or_one_sentence(fuzz: Any) -> None:
    fuzz.run(configure, examples=200)
