"""Our client at servers with keys and without: it is let in, or reports why not and computes."""

import pytest
from client_helpers import NAMESPACE, block, empty_rows, key, rows_of
from fake_server import PATIENCE_S, eventually
from memory_server import memory_server
from tenancy import tenancy

from remote_server.cli.__main__ import main
from remote_server.client import ClientConfig, GetOutcome, RemoteClient
from remote_server.client.shm import attachment
from remote_server.errors import ConfigError, ServerUnavailable
from remote_server.keys import make_keys
from remote_server.native import why_no_tls
from remote_server.shm.mapping import NotAttachable

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]
assert tenancy


def connect(make_client, tenancy, name: str, **settings) -> RemoteClient:
    return make_client(tenancy.server.endpoint, keys=tenancy.client_file(name), **settings)


@pytest.mark.parametrize("transport", ["tcp", "lanes", "shm"], indirect=True)
def test_blocks_go_there_and_back_encrypted_and_on_one_host_through_shared_memory(
    tenancy, make_client, transport
):
    if transport == "lanes" and (why := why_no_tls()):
        pytest.skip(why)
    server = tenancy.start(memory=64 << 20, lanes="127.0.0.1:*")
    client = connect(make_client, tenancy, "a")
    keys = [key(number) for number in range(20)]
    put = client.put(NAMESPACE, keys, rows_of(range(20)), deferred=False).result(PATIENCE_S)
    assert put.created == 20
    target = empty_rows(20)
    got = client.get(NAMESPACE, keys, target).result(PATIENCE_S)
    assert got.landed == [*range(20)]
    assert [bytes(row) for row in target] == [bytes(block(number)) for number in range(20)]
    assert (client.counters()["shm_bytes_in"] > 0) is (transport == "shm")
    other = connect(make_client, tenancy, "b")
    missed = other.get(NAMESPACE, keys, empty_rows(20)).result(PATIENCE_S)
    assert missed.outcomes == [GetOutcome.MISS] * 20
    assert server.tenants["b"].store.counters["bytes_in"] == 0


def test_a_frame_of_the_largest_size_passes_encrypted(tenancy, make_client):
    """Encryption makes it longer, and a frame above the limit would close the connection."""
    size = 64 << 20
    tenancy.write(a="")
    tenancy.start(memory=1 << 30)
    client = connect(make_client, tenancy, "a", block_bytes=size)
    row = memoryview(bytearray(size))
    assert client.put(NAMESPACE, [key(1)], [row], deferred=False).result(PATIENCE_S).created
    into = memoryview(bytearray(b"\1") * size)
    got = client.get(NAMESPACE, [key(1)], [into]).result(PATIENCE_S)
    assert got.landed == [0]
    assert into == row


def told(client: RemoteClient, reason: str) -> None:
    """`client` reports it, at once and for every request, and never gets in."""

    def says_so() -> bool:
        error = client.lookup(NAMESPACE, [key(1)], timeout_s=60).exception(PATIENCE_S)
        assert isinstance(error, ServerUnavailable)
        return reason in str(error)

    eventually(says_so)
    put = client.put(NAMESPACE, [key(1)], rows_of(range(1)), timeout_s=60).result(PATIENCE_S)
    assert isinstance(put.error, ServerUnavailable)
    assert not client.ready


def test_a_client_whose_key_nobody_knows_says_so_and_every_block_is_a_miss(
    tenancy, make_client, caplog
):
    tenancy.start()
    make_keys(tenancy.folder, ["stranger"])
    client = connect(make_client, tenancy, "stranger", wait=False)
    told(client, "the server does not know our key")
    assert client.absent, "so nobody waits for it at start"
    assert caplog.text.count("does not know our key; every block is a miss") == 1


def test_a_client_without_keys_at_a_server_with_keys_says_so(tenancy, make_client):
    tenancy.start()
    told(make_client(tenancy.server.endpoint, wait=False), "the server demands keys")


def test_a_client_with_keys_does_not_speak_to_a_server_without(tenancy, make_client):
    """It would send an engine's blocks to any process that took the server's address."""
    with memory_server() as server:
        client = make_client(server.endpoint, keys=tenancy.client_file("a"), wait=False)
        told(client, "the server has no keys")
        assert server.store.namespaces.known == {}


def test_a_client_that_holds_another_servers_key_says_so(tenancy, make_client, tmp_path):
    tenancy.start()
    make_keys(tmp_path / "elsewhere", ["a"])
    file = str(tmp_path / "elsewhere" / "client-a.key")
    client = make_client(tenancy.server.endpoint, keys=file, wait=False)
    told(client, f"most likely not the one whose public key {file} holds")


def test_a_client_above_the_limit_of_connections_says_so_and_comes_in_when_there_is_room(
    tenancy, make_client, context
):
    server = tenancy.start(max_connections=8)
    first = tenancy.peer("a")
    others = [tenancy.peer(name) for name in "aaabbbb"]
    for peer in (first, *others):
        peer.stats()
    client = connect(make_client, tenancy, "b", wait=False, lanes=0)
    told(client, "the server is at its limit of connections")
    assert first.stats().counters["peers_refused_connections"] > 0
    for peer in (first, *others):
        peer.socket.close()
    eventually(lambda: client.ready)
    eventually(lambda: server._auth.num_connections == 3)


def test_a_key_that_becomes_known_lets_a_waiting_client_in(tenancy, make_client):
    tenancy.start()
    make_keys(tenancy.folder, ["a"], "late")
    client = connect(make_client, tenancy, "a-late", wait=False)
    told(client, "does not know our key")
    tenancy.write(a=f'keys = ["{tenancy.public_key("a")}", "{tenancy.public_key("a-late")}"]')
    eventually(lambda: client.ready)


def test_a_namespace_that_the_key_does_not_allow_is_never_ready_and_says_so(tenancy, make_client):
    tenancy.write(a='namespaces = ["mine"]')
    tenancy.start()
    client = connect(make_client, tenancy, "a", wait=False)

    def refused() -> bool:
        error = client.lookup(NAMESPACE, [key(1)]).exception(PATIENCE_S)
        return "your key does not allow the namespace" in str(error)

    eventually(refused)
    assert not client.ready


def test_a_key_file_that_others_can_read_stops_a_client_before_it_starts(tenancy, tmp_path):
    (tenancy.folder / "client-a.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        RemoteClient(ClientConfig("tcp://127.0.0.1:9", keys=tenancy.client_file("a")))


def test_memory_is_not_handed_to_a_local_socket_of_another_user(monkeypatch):
    """Who takes the name of a server that has ended would get to read the engine's pool."""
    monkeypatch.setattr(attachment.os, "getuid", lambda: 1000)  # type: ignore[attr-defined]
    monkeypatch.setattr(attachment, "user_of", lambda connection: 1001)
    with pytest.raises(NotAttachable, match="belongs to user 1001"):
        attachment._check_server_user(None)
    for allowed in (0, 1000):
        monkeypatch.setattr(attachment, "user_of", lambda connection, uid=allowed: uid)
        attachment._check_server_user(None)


def test_a_command_names_the_reason_why_the_server_refuses_it(tenancy, capsys):
    tenancy.write(a="")
    endpoint = tenancy.start().endpoint
    for address, why in (
        (endpoint, "the server demands keys"),
        (f"{endpoint}?keys={tenancy.client_file('b')}", "key"),
    ):
        assert main(["stats", "--server", address, "--timeout-s", "60"]) == 3
        error = capsys.readouterr().err
        assert why in error and "is it running" not in error
