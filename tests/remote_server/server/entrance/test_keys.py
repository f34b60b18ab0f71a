"""Key files: how they are made, and which ones are refused."""

import ctypes
import itertools
import os
import re
import stat

import pytest
import zmq
from tenancy import tenancy
from zmq.utils import z85

from remote_server.cli.__main__ import main
from remote_server.errors import ConfigError
from remote_server.keys import (
    certificate_path,
    make_keys,
    read_certificate,
    read_client_keys,
    read_server_keys,
)
from remote_server.server.config import ServerConfig, keys_of_tenants, read_tenants

assert tenancy


def config(tenants, **fields) -> ServerConfig:
    return ServerConfig(keys="server.key", tenants=str(tenants), **fields)


SECRETS = itertools.count(8, 8)
"""The same in each run, for the names of tests. Curve25519 ignores the lowest three bits."""


def entry(**fields: object) -> str:
    public = zmq.curve_public(z85.encode(next(SECRETS).to_bytes(32, "little")))
    lines = {"keys": [public.decode()], **fields}
    return "".join(f"{name} = {value!r}\n".replace("'", '"') for name, value in lines.items())


def test_the_command_makes_secret_files_and_says_what_to_put_where(tmp_path, capsys):
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "blue", "red"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(
        ("server.key", "server.pem", "tenants.toml", "client-blue.key", "client-red.key"), 0o600
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert f"--keys {folder}/server.key --tenants {folder}/tenants.toml" in out
    assert f"?keys={folder}/client-blue.key" in out
    blue = read_client_keys(str(folder / "client-blue.key"))
    server = read_server_keys(str(folder / "server.key"))
    assert blue.server == server.public
    assert keys_of_tenants(str(folder / "tenants.toml"))[blue.public.decode()] == "blue"
    for secret in (blue.secret, server.secret, b"PRIVATE KEY"):
        assert secret.decode() not in out


def test_the_certificate_of_older_keys_is_made_without_another_tenant(tmp_path, capsys):
    make_keys(tmp_path, ["a"])
    (tmp_path / "server.pem").unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["keys", str(tmp_path)]) == 0
    assert f"{tmp_path}/server.pem" in capsys.readouterr().out
    made = read_certificate(certificate_path(str(tmp_path / "server.key")))
    assert made is not None
    assert main(["keys", str(tmp_path)]) == 0
    assert read_certificate(str(tmp_path / "server.pem")) == made, "it is kept"
    assert {path: path.read_bytes() for path in before} == before


def test_without_openssl_keys_are_made_and_no_certificate(tmp_path, monkeypatch):
    def missing(_name):
        raise OSError("libcrypto.so.3: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    lines = make_keys(tmp_path, ["a"])
    assert any("no certificate" in line and "libcrypto.so.3" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "client-a.key", "server.key", "tenants.toml"
    ]  # fmt: skip


def test_nothing_that_exists_is_overwritten_also_when_it_appears_in_between(
    tmp_path, capsys, monkeypatch
):
    make_keys(tmp_path, ["a"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["keys", str(tmp_path), "b", "a"]) == 2
    assert "client-a.key exists and is not overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before, "not even b's"
    (tmp_path / "client-c.key").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="exists"):
        make_keys(tmp_path, ["c"])
    monkeypatch.setattr(os.path, "lexists", lambda path: "client" not in str(path))
    with pytest.raises(ConfigError, match="File exists"):
        make_keys(tmp_path, ["a"])
    assert {path: path.read_bytes() for path in before} == before


def test_a_second_pair_for_a_tenant_goes_beside_the_first_and_is_added_by_hand(tmp_path):
    make_keys(tmp_path, ["a"])
    tenants = (tmp_path / "tenants.toml").read_bytes()
    lines = make_keys(tmp_path, ["a"], "second")
    new = read_client_keys(str(tmp_path / "client-a-second.key"))
    assert new.server == read_client_keys(str(tmp_path / "client-a.key")).server
    assert f'keys = ["{new.public.decode()}"]' in lines
    assert (tmp_path / "tenants.toml").read_bytes() == tenants


@pytest.mark.parametrize("name", ["", "A", "../x", "a/b", "-a", "a" * 65, "ä"])
def test_a_name_that_cannot_be_a_file_or_a_table_is_refused(tmp_path, name):
    for tenants, suffix in (([name], ""), (["a"], name or "/")):
        with pytest.raises(ConfigError, match="cannot name a tenant"):
            make_keys(tmp_path / "new", tenants, suffix)
    assert not (tmp_path / "new").exists()


def test_a_secret_that_others_can_read_and_a_tenants_file_that_they_can_write_are_refused(tmp_path):
    make_keys(tmp_path, ["a"])
    for name, read in (("server.key", read_server_keys), ("client-a.key", read_client_keys)):
        path = tmp_path / name
        for mode in (0o640, 0o604, 0o620, 0o610):
            path.chmod(mode)
            with pytest.raises(ConfigError, match=f"{path} has mode {mode:04o}.*chmod 600 {path}"):
                read(str(path))
        path.chmod(0o400)
        assert read(str(path))
    path = tmp_path / "tenants.toml"
    path.chmod(0o644)
    assert keys_of_tenants(str(path))
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="others could add their keys"):
            keys_of_tenants(str(path))


def test_a_key_file_of_somebody_else_is_refused(tmp_path, monkeypatch):
    make_keys(tmp_path, ["a"])
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "server.key").stat().st_uid + 1)
    if (tmp_path / "server.key").stat().st_uid == 0:
        pytest.skip("run as root, whose files are everybody's to trust")
    with pytest.raises(ConfigError, match="belongs to user"):
        read_server_keys(str(tmp_path / "server.key"))


def test_what_is_wrong_with_a_key_file_is_said_without_its_secret(tmp_path):
    make_keys(tmp_path, ["a"])
    server, client = tmp_path / "server.key", tmp_path / "client-a.key"
    secret = read_server_keys(str(server)).secret.decode()
    text = server.read_text()
    other = zmq.curve_keypair()[1].decode()
    for bad, complaint in (
        (text.replace(secret, secret[:-1]), "secret_key is not a key"),
        (text.replace(secret, secret[:-1] + "~"), "secret_key is not a key"),
        (text.replace(secret, other), "are not a pair"),
        (text + 'more = "x"\n', "more than"),
        (text.replace("secret_key", "secret"), "has no secret_key"),
        (text.replace('"', ""), "is not TOML"),
    ):
        server.write_text(bad)
        with pytest.raises(ConfigError, match=complaint) as raised:
            read_server_keys(str(server))
        assert secret[:-1] not in str(raised.value)
        assert other not in str(raised.value)
    with pytest.raises(ConfigError, match="more than"):
        read_server_keys(str(client))
    with pytest.raises(ConfigError, match="No such file"):
        read_client_keys(str(tmp_path / "none.key"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has 0 tenants"),
        ("a = 1", "write a table"),
        ("[a]\nkeys = []", "no keys"),
        ("[a]\nmemory = 1", "missing required field `keys`"),
        ('[a]\nkeys = ["short"]', "'short' is not a key"),
        ("[A]\n" + entry(), "name is up to"),
        ("[a]\n" + entry(quota=1), "unknown field `quota`"),
        ("[a]\n" + entry(memory="much"), "memory: 'much' is not a size"),
        ("[a]\n" + entry(memory="2GiB"), "together the tenants have 2.0 GiB"),
        ("[a]\n" + entry(memory=1000), "below the least"),
        ("[a]\n" + entry(memory="1GiB") + "[b]\n" + entry(), "b: 0 B of memory"),
        ("[a]\n" + entry(disk="1GiB"), "has none: --disk"),
        ("[a]\n" + entry(namespaces=[""]), "allows all"),
        ("[a]\n" + entry(namespace_memory="2GiB"), "namespace_memory is 2.0 GiB"),
        ("[a]\n" + entry(ttl_s=-1), "ttl_s is -1"),
        ("[a]\n" + entry(ttl_s=float("nan")), "ttl_s is nan"),
    ],
)
def test_a_wrong_tenants_file_is_refused_by_file_and_tenant(tmp_path, text, complaint):
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=f"{path}.*{re.escape(complaint)}"):
        read_tenants(config(path))


def test_memory_is_divided_as_written_and_what_is_left_equally(tmp_path):
    path = tmp_path / "tenants.toml"
    path.write_text(f"[a]\n{entry(memory='4MiB')}[b]\n{entry()}[c]\n{entry(ttl_s=5)}")
    path.chmod(0o600)
    a, b, c = read_tenants(config(path, memory=10 << 20, ttl_s=60))
    assert (a.memory, b.memory, c.memory) == (4 << 20, 3 << 20, 3 << 20)
    assert (a.ttl_s, b.ttl_s, c.ttl_s) == (60, 60, 5)


def test_what_is_given_to_tenants_fits_the_disk_and_one_key_is_one_tenant(tmp_path):
    path, same = tmp_path / "tenants.toml", entry(disk="40MiB")
    path.write_text(f"[a]\n{same}[b]\n{entry(disk='40MiB')}")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"--disk-bytes is 64\.0 MiB"):
        read_tenants(config(path, disk="somewhere", disk_bytes=64 << 20))
    path.write_text(f"[a]\n{same}[b]\n{same}")
    with pytest.raises(ConfigError, match="a key belongs to one tenant"):
        read_tenants(config(path, disk="somewhere", disk_bytes=1 << 30))


def test_keys_and_tenants_need_each_other_and_open_other_machines_the_way():
    with pytest.raises(ConfigError, match="needs --tenants"):
        ServerConfig(keys="server.key")
    with pytest.raises(ConfigError, match="needs --keys"):
        ServerConfig(tenants="tenants.toml")
    with pytest.raises(ConfigError, match=r"kvferry keys DIR TENANT.*--keys.*--insecure"):
        ServerConfig(bind="tcp://0.0.0.0:5757")
    assert ServerConfig(bind="tcp://0.0.0.0:5757", keys="server.key", tenants="tenants.toml")
