"""A server's process with keys, a client with encrypted lanes, and what the commands report."""

import json
from contextlib import closing

import pytest
from client_helpers import BLOCK_BYTES, NAMESPACE, PatientClient, block, empty_rows, key, rows_of
from fake_server import eventually
from server_process import ServerProcess

from remote_server.cli.__main__ import main
from remote_server.client import ClientConfig
from remote_server.client.lane_opening import why_slow
from remote_server.keys import make_keys
from remote_server.native import why_no_tls

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(
        bool(why_slow() or why_no_tls()), reason=why_slow() or why_no_tls() or "none"
    ),
]


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys", ["a"])
    return tmp_path / "keys"


def server_at(folder) -> ServerProcess:
    keys, tenants = folder / "server.key", folder / "tenants.toml"
    return ServerProcess("64MiB", "--keys", str(keys), "--tenants", str(tenants))


def findings(address: str, capsys) -> dict[str, dict[str, str]]:
    main(["doctor", "--json", "--server", address])
    return {found["check"]: found for found in json.loads(capsys.readouterr().out)}


def test_blocks_pass_encrypted_and_doctor_says_so(folder, capsys):
    keys, rows = [key(number) for number in range(50)], empty_rows(50)
    with closing(server_at(folder)) as server:
        client_file = str(folder / "client-a.key")
        config = ClientConfig(server.endpoint, keys=client_file, transport="tcp")
        with closing(PatientClient(config)) as client:
            client.declare(NAMESPACE, BLOCK_BYTES)
            eventually(lambda: client.lanes.num_open == 2)
            put = client.put(NAMESPACE, keys, rows_of(range(50)), deferred=False).result(30)
            assert put.created == 50
            assert len(client.get(NAMESPACE, keys, rows).result(30).landed) == 50
            assert [bytes(row) for row in rows] == [bytes(block(number)) for number in range(50)]
            counters = client.counters()
            assert counters["lane_bytes_in"] == counters["lane_bytes_out"] == 50 * BLOCK_BYTES
            found = findings(f"{server.endpoint}?keys={client_file}", capsys)
            assert found["lanes"]["verdict"] == found["lanes from here"]["verdict"] == "ok"
            assert found["lanes"]["told"].endswith("encrypted")
