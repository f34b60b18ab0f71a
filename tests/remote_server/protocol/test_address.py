"""A wrong address is met with one sentence that names its wrong part, wherever it is given."""

from collections.abc import Callable
from operator import itemgetter

import pytest
from lane_peer import has_ipv6
from memory_server import memory_server
from typed_commands import flags_of

from benchmarks.storage_workload.backends.payload import Payload
from benchmarks.storage_workload.backends.wire import WireBackend
from kv_connector.config import ConnectorConfig, RemoteConfig, read_config
from remote_server.cli.__main__ import main
from remote_server.cli.servers import servers_of
from remote_server.client import ClientConfig
from remote_server.errors import ConfigError
from remote_server.fleet.server_list import read_list
from remote_server.server.config import ServerConfig
from remote_server.values import admin_address, check_endpoint, server_address, with_scheme

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

WRONG = [
    ("tcp:localhost:5757", "host 'tcp:localhost' has a colon"),
    ("localhost", "the port is missing"),
    ("", "the port is missing"),
    ("ipc:///tmp/kvferry", "ipc:// is not supported, and on one host blocks go through shared"),
    ("http://h:5757", "http:// is not tcp://"),
    ("TCP://h:5757", "TCP:// is not tcp://"),
    ("tcp://", "the port is missing"),
    ("tcp://h", "the port is missing"),
    ("tcp://[::1]", "the port is missing"),
    ("tcp://:5757", "the host is missing"),
    ("tcp://h:", "port '' is not a number from 1 to 65535"),
    ("tcp://h:0", "port '0' is not"),
    ("tcp://h:65536", "port '65536' is not"),
    ("tcp://h:http", "port 'http' is not"),
    ("tcp://h:\u0665", "port '\u0665' is not"),
    ("tcp://h:5757/cache", "'/cache' behind the port is no part of an address"),
    ("tcp://::1:5757", "host '::1' has a colon; an IPv6 address stands in brackets"),
    ("tcp://[::x]:5757", "host '[::x]' is not an IPv6 address"),
    ("tcp://user@h:5757", "host 'user@h' is neither a name nor an address"),
    ("tcp://a b:5757", "host 'a b' is neither"),
    ("tcp://eth0;h:5757", "host 'eth0;h' is neither"),
    (" tcp://h:5757", " tcp:// is not tcp://"),
]
NOT_FOR_CLIENTS = [
    ("tcp://*:5757", "host '*' is for a server that listens"),
    ("tcp://h:*", "port '*' is for a server that listens"),
]
WRONG_OPTIONS = [
    ("tcp://h:1?", "'?' behind the port is no key file; write it like tcp://127.0.0.1:5757?keys="),
    ("tcp://h:1?keys=", "'?keys=' behind the port is no key file"),
    ("tcp://h:1?key=/x", "'?key=/x' behind the port is no key file"),
    (
        "tcp://h:1?keys=/x&nam=a",
        "'?keys=/x&nam=a' behind the port is no key file: 'nam' is none of",
    ),
    ("tcp://h:1?keys=/x&keys=/y", "'?keys=/x&keys=/y' behind the port has keys= twice"),
    ("tcp://h:1?name=", "'?name=' behind the port has the name '': a name has 1 to 63"),
    ("tcp://h:1?name=a b", "'?name=a b' behind the port has the name 'a b'"),
    ("tcp://h:1?copies=all", "'?copies=all' behind the port has copies=all, and only copies=head"),
]

WAYS: list[tuple[str, Callable[[str], object]]] = [
    ("kv_connector_extra_config: server: ",
     lambda text: read_config(ConnectorConfig, {"server": text}, "kv_connector_extra_config")),
    ("entry RemoteTier: server: ",
     lambda text: read_config(RemoteConfig, {"server": text}, "entry RemoteTier")),
    ("server: ", lambda text: WireBackend(text, 4096, Payload(1, 4096))),
    ("endpoint: ", ClientConfig),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wrong"), WRONG + NOT_FOR_CLIENTS + WRONG_OPTIONS)
def test_where_a_client_connects(text: str, wrong: str):
    with pytest.raises(ConfigError) as refused:
        server_address(text)
    said = str(refused.value)
    assert (
        said.startswith(f"server: {with_scheme(text)!r}: {wrong}")
        and said.count("write it like tcp://") == 1
    )
    assert "\n" not in said


@pytest.mark.parametrize(("setting", "way"), WAYS)
def test_every_setting_of_an_address_is_read_so(setting: str, way: Callable[[str], object]):
    for text, wrong in (WRONG[-2], WRONG[-1], *NOT_FOR_CLIENTS):
        with pytest.raises(ConfigError) as refused:
            way(text)
        assert str(refused.value).startswith(f"{setting}{text!r}: {wrong}")


def test_where_a_server_listens():
    for text, wrong in filter(itemgetter(0), WRONG):
        with pytest.raises(ConfigError) as refused:
            ServerConfig(bind=text)
        assert str(refused.value).startswith(f"bind: {with_scheme(text)!r}: {wrong}")


@pytest.mark.parametrize(
    "command", ["stats", "why", "doctor", "watch", "clear --all", "pin n", "bench"]
)
def test_a_command_with_a_wrong_address_is_wrong_usage(command: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), "--server", "ipc:///tmp/kvferry"])
    mistake, hint = capsys.readouterr().err.strip().splitlines()
    name = command.split()[0]
    assert f"kvferry {name}: --server: 'ipc:///tmp/kvferry': ipc:// is not supported" in mistake
    assert f"`kvferry {name} --help`" in hint


def test_so_is_a_wrong_variable(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setenv("KVFERRY_SERVER", "http://localhost:5757")
    with pytest.raises(SystemExit, match="2"):
        main(["stats"])
    assert "'http://localhost:5757': http:// is not tcp://" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:5757", "tcp://cache-1.example.com:1", "tcp://a_b:65535",
             "tcp://[::1]:5757", "tcp://[fe80::1%eth0]:5757"],
)  # fmt: skip
def test_a_right_address_may_name_its_key_file(text: str):
    assert server_address(text) == (text, "", "", False)
    keys = "/x/client.key"
    assert server_address(f"{text}?keys={keys}") == (text, keys, "", False)
    assert server_address(f"{text}?copies=head&name=a-1.x&keys={keys}") == (
        text,
        keys,
        "a-1.x",
        True,
    )
    check_endpoint(text, "endpoint")
    assert ClientConfig(text).endpoint == ServerConfig(bind=text, insecure=True).bind == text


def test_the_scheme_may_be_omitted():
    assert server_address("h:5757?keys=/x") == server_address("tcp://h:5757?keys=/x")
    config = ServerConfig(bind="127.0.0.1:*", events="127.0.0.1:5759", admin="127.0.0.1:5768")
    assert (config.bind, config.events) == ("tcp://127.0.0.1:*", "tcp://127.0.0.1:5759")
    assert admin_address(config.admin) == admin_address("http://127.0.0.1:5768")
    assert read_list("kvferry-{0..1}.x:5757") == read_list("tcp://kvferry-{0..1}.x:5757")
    typed = flags_of("stats", ["--server", "a:1,tcp://b:2?keys=/x,y, c:3"])
    keys = {one.name: one.keys for one in servers_of(typed).members}
    assert keys == {"a": "", "b": "/x,y", "c": ""}


def test_a_client_reaches_a_server_on_ipv6(make_client):
    if not has_ipv6():
        pytest.skip("no IPv6 on this host")
    with memory_server(bind="tcp://[::1]:*") as server:
        assert make_client(server.endpoint).stats().result(60).tiers
