"""Our client and encrypted lanes: the right certificate, a wrong one, and none."""

import json
import logging
import ssl

import pytest
from client_helpers import put_and_get_back, wait_for_lanes
from fake_lanes import FakeLanes
from fake_server import eventually
from msgspec.structs import replace
from tenancy import tenancy
from tls_helpers import a_certificate

from remote_server.cli.__main__ import main
from remote_server.client.lanes import opening as lane_opening
from remote_server.native import why_no_tls

pytest_plugins = ["client_fixtures"]

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(bool(why_no_tls()), reason=why_no_tls() or "none"),
]

assert tenancy


@pytest.fixture
def lanes(far) -> FakeLanes:
    """They show the certificate that they name."""
    certificate = a_certificate()
    far.lanes.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    far.lanes.tls.load_cert_chain(certificate.path)
    far.lanes.certificate = certificate.pin
    return far.lanes


def logged(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if "no lanes" in one.getMessage()]


def test_blocks_go_over_encrypted_lanes_to_another_implementation(far, lanes, make_client):
    client = make_client(far.endpoint)
    wait_for_lanes(client)
    put_and_get_back(client)
    assert client.counters()["lane_bytes_in"] == client.counters()["bytes_in"] > 0
    assert client.counters()["lane_bytes_out"] == client.counters()["bytes_out"] > 0


def test_a_server_with_another_certificate_gets_no_token_and_no_block(
    far, lanes, make_client, caplog
):
    lanes.certificate = a_certificate("another").pin
    client = make_client(far.endpoint)
    eventually(lambda: client.counters()["lanes_not_trusted"] >= 2)
    put_and_get_back(client)
    assert client.counters()["lane_bytes_out"] == client.lanes.num_open == 0
    assert lanes.preambles == b""
    (line,) = logged(caplog)
    assert "another certificate than the pinned one" in line


def test_a_port_that_speaks_no_tls_gets_no_token_and_no_block(far, lanes, make_client, caplog):
    lanes.tls = None
    client = make_client(far.endpoint)
    eventually(lambda: client.counters()["lanes_refused"] >= 2)
    put_and_get_back(client)
    assert client.lanes.num_open == 0
    assert not any(token in lanes.preambles for token in lanes.tokens)
    assert len(logged(caplog)) == 1


def test_a_name_of_a_certificate_of_another_length_is_refused(far, lanes, make_client):
    lanes.certificate = lanes.certificate[:20]
    client = make_client(far.endpoint)
    eventually(lambda: client.counters()["lanes_refused"] >= 2)
    put_and_get_back(client)
    assert not lanes.preambles


# ── with keys ────────────────────────────────────────────────────────────────────────────


def connect(make_client, tenancy, **settings):
    return make_client(
        tenancy.server.endpoint, keys=tenancy.client_file("a"), **{"lanes": 2, **settings}
    )


def test_doctor_says_that_lanes_are_encrypted(tenancy, capsys):
    server = tenancy.start(lanes="127.0.0.1:*")
    main(["doctor", "--json", "--server", f"{server.endpoint}?keys={tenancy.client_file('a')}"])
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["lanes"]["told"].endswith("encrypted")
    assert found["lanes from here"]["verdict"] == "ok"


def test_a_client_with_keys_opens_no_lane_in_clear(tenancy, make_client, monkeypatch, caplog):
    """Whatever the server offers."""
    server = tenancy.start(memory=64 << 20, lanes="127.0.0.1:*")
    announce = server.lanes.announce
    monkeypatch.setattr(
        server.lanes, "announce", lambda *given: replace(announce(*given), certificate=b"")
    )
    client = connect(make_client, tenancy)
    eventually(lambda: client.counters()["lanes_refused"] >= 2)
    put_and_get_back(client)
    assert client.counters()["lane_bytes_out"] == 0
    assert any("not encrypted" in line for line in logged(caplog))
    assert server.lanes.counters["lanes_refused_handshake"] == 0, "no connection was made"


def test_a_client_with_keys_and_without_openssl_asks_for_none(
    tenancy, make_client, monkeypatch, caplog
):
    monkeypatch.setattr(lane_opening, "why_no_tls", lambda: "libssl.so.3 is missing")
    caplog.set_level(logging.INFO)
    server = tenancy.start(memory=64 << 20, lanes="127.0.0.1:*")
    client = connect(make_client, tenancy)
    put_and_get_back(client)
    (line,) = logged(caplog)
    assert "cannot be encrypted: libssl.so.3 is missing" in line
    assert client.counters()["lanes_refused"] == server.lanes.counters["lanes_opened"] == 0
