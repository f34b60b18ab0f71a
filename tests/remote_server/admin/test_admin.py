"""The admin HTTP over a real server: its answers, the right to change, and what does no harm."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from admin_http import TOKEN, Http, raw, served, write_token
from copy_jobs import CountedJob
from gates import copies_held, jobs_held
from metrics_helpers import a_snapshot
from prometheus_client.parser import text_string_to_metric_families
from wire_peer import BLOCK_BYTES, Peer, key

from remote_server import values
from remote_server.admin import admin as admin_thread
from remote_server.admin import engines, site
from remote_server.admin.admin import Admin, read_token
from remote_server.errors import ConfigError, ServerUnavailable
from remote_server.protocol import EngineReport, EngineState, Lookup, NamespaceStats
from remote_server.server.config import ServerConfig
from remote_server.server.reports.snapshot import MASK, Snapshot, shown
from remote_server.values import MiB

pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("no_old_answers")]

# ── its answers ──────────────────────────────────────────────────────────────────────────


def value_of(text: str, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


NO_HTTP = [
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"b" * 9000 + b"\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET http://[::bad HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /clear HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


async def test_the_engines_are_those_connected_with_what_keeps_them_apart(http, pair, context):
    facts = {"model_name": "llama", "dtype": "half", "layout": "a"}
    reports = {"a": EngineReport("vLLM 0.32.0", 1000, {"engine": 100, "server": 250}),
               "b": EngineReport("vLLM 0.33.0")}  # fmt: skip
    peers = {}
    for name, namespace in (("a", "llama@1"), ("b", "llama@2")):
        peers[name] = Peer(context, pair[0].endpoint)
        other = facts | ({"dtype": "float"} if name == "b" else {})
        peers[name].hello(namespace, client=name, fingerprint=other, report=reports[name])
    peers["a"].put(range(2), namespace="llama@1")
    Peer(context, pair[0].endpoint).hello("kvferry/bench", client="bench")
    a, b = json.loads((await http.get("/stats"))[2])["engines"]
    assert (a["client"], a["model"], a["software"]) == ("a", "llama", "vLLM 0.32.0")
    assert (a["prompt_tokens"], a["reused"]) == (1000, {"engine": 100, "server": 250})
    assert a["why"] == [], "there is nothing else to find"
    assert b["namespace"] == "llama@2"
    (why,) = b["why"]
    assert "b cannot use the blocks of llama@1" in why
    assert "dtype is float here and half there" in why


async def test_a_look_at_a_thousand_namespaces_compares_each_engine_with_a_few(monkeypatch):
    names = [f"ns-{number}" for number in range(1000)]
    spaces = {name: NamespaceStats(block_bytes=1, client=name, fingerprint={"dtype": name})
              for name in names}  # fmt: skip
    everybody = [
        EngineState(namespace=name, client=name, model="", software="", prompt_tokens=0, reused={})
        for name in names
    ]
    compared = []
    monkeypatch.setattr(engines, "gaps_of", lambda *about: compared.append(len(about[-1])) or [])
    snapshot = a_snapshot(namespaces=spaces, engines=everybody)
    assert len(engines.described(snapshot)) == engines.MOST_ENGINES == len(compared)
    assert max(compared) <= engines.MOST_COMPARED + 1


async def test_a_request_that_is_no_http_is_a_line_in_the_log_and_no_traceback(http, pair, caplog):
    for request in NO_HTTP:
        with raw(pair[1].url, request) as connection:
            assert await asyncio.to_thread(connection.recv, 12) == b"HTTP/1.0 400"
    ours = [one for one in caplog.records if "a request is refused" in one.getMessage()]
    assert 0 < len(ours) <= len(NO_HTTP)
    assert not [one for one in caplog.records if one.exc_info]
    assert (await http.get("/health"))[0] == 200


async def test_an_idle_server_is_alive_and_ready(http):
    assert (await http.get("/health"))[::2] == (200, "alive\n")
    assert (await http.get("/ready"))[::2] == (200, "ready\n")


@pytest.fixture
async def unasked(tmp_path):
    """A server of the test's own, above a disk, and its admin HTTP."""
    with served(disk=str(tmp_path / "disk"), disk_bytes=64 * MiB) as (server, admin):
        async with aiohttp.ClientSession() as session:
            yield server, Http(session, admin.url)


async def test_stats_and_metrics_say_what_was_put_got_and_missed(unasked, context):
    server, http = unasked
    peer = Peer(context, server.endpoint)
    peer.hello("said", client="engine-1")
    peer.put(range(8), namespace="said")
    peer.get(range(10), namespace="said")
    wanted = [key(n) for n in range(6, 12)]
    peer.ask(Lookup(request_id=peer.next_id(), namespace="said", keys=wanted))
    async with asyncio.timeout(60):
        while True:  # the stream counts as soon as the loop finds it at its end
            _, headers, body = await http.get("/stats")
            said = json.loads(body)
            if said["operations"]["stream"]["count"]:
                break
    assert headers["Content-Type"].startswith("application/json")
    assert said["namespaces"]["said"]["tiers"]["memory"]["blocks"] == 8
    assert said["namespaces"]["said"]["client"] == "engine-1"
    traffic = said["traffic"]["said"]
    assert (traffic["put_kept"], traffic["get_hit"], traffic["get_miss"]) == (8, 8, 2)
    assert (traffic["lookup_hit"], traffic["lookup_miss"]) == (2, 4)
    assert traffic["bytes_in"] == traffic["bytes_out"] == 8 * 4096
    assert said["operations"]["put"]["count"] == said["operations"]["stream"]["count"] == 1
    assert 0 < said["operations"]["get"]["p50_s"] <= said["operations"]["get"]["p99_s"] <= 10
    assert said["connections"] >= 1
    assert said["queues"]["requests"] == 0
    assert said["puts"] == {"reserving": 0, "filling": 0, "publishing": 0}
    assert [*said["gets"]] == ["finding", "reading", "sending"]
    _, headers, text = await http.get("/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert value_of(text, "kvferry_server_tier_gets_total", tier="memory", outcome="hit") == 8
    assert value_of(text, "kvferry_server_tier_gets_total", tier="disk", outcome="miss") == 2
    assert value_of(text, "kvferry_server_lookup_keys_total", outcome="miss") == 4
    assert value_of(text, "kvferry_server_request_seconds_count", operation="put") == 1
    assert value_of(text, "kvferry_server_bytes_total", direction="out", transport="tcp") == 32768
    assert value_of(text, "kvferry_server_namespace_blocks", namespace="said", tier="memory") == 8


async def test_settings_in_force_are_shown_and_no_token_is_in_them(pair, http):
    _, _, body = await http.get("/settings")
    assert json.loads(body)["disk_bytes"] == pair[0].config.disk_bytes
    for path in ("/settings", "/stats", "/metrics", "/"):
        assert TOKEN not in (await http.get(path))[2]


def test_a_setting_that_is_a_secret_is_masked_when_it_is_set():
    class Later(ServerConfig, frozen=True, kw_only=True):
        server_secret_key: str = ""
        other_token: str = ""

    masked = shown(Later(server_secret_key="xyzzy", admin_token_file="/run/token"))
    assert masked["server_secret_key"] == MASK
    assert masked["other_token"] == ""
    assert masked["admin_token_file"] == "/run/token"


async def test_a_loop_that_does_not_answer_makes_health_a_503_and_then_200_again(
    pair, http, monkeypatch
):
    monkeypatch.setattr(site, "ALIVE_S", 0.05)
    held, go_on = threading.Event(), threading.Event()

    def stand_still():
        held.set()
        go_on.wait(60)

    standing = pair[0].loop_calls.call(stand_still)
    assert await asyncio.to_thread(held.wait, 60)
    assert (await http.get("/health"))[0] == 503
    assert (await http.get("/settings"))[0] == 200, "what needs no answer is there"
    go_on.set()
    standing.result(30)
    monkeypatch.setattr(site, "ALIVE_S", 60.0)
    assert (await http.get("/health"))[0] == 200


async def test_answers_carry_headers_that_keep_them_to_this_page(http):
    for path, status in (("/", 200), ("/stats", 200), ("/nowhere", 404)):
        got, headers, _ = await http.get(path)
        assert got == status
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Server"] == "kvferry"


async def test_a_page_from_elsewhere_that_borrows_our_address_is_refused(pair, http):
    elsewhere = {"Host": "attacker.example:5758"}
    assert (await http.get("/stats", headers=elsewhere))[0] == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:5758"):
        assert (await http.get("/stats", headers={"Host": host}))[0] == 200


# ── who may change something ─────────────────────────────────────────────────────────────


async def test_no_change_without_exactly_the_token(pair, http, context):
    peer = Peer(context, pair[0].endpoint)
    peer.hello("kept")
    peer.put([1], namespace="kept")
    for path in ("/clear", "/drain"):
        for said in ("", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}",
                     f"Basic {TOKEN}", TOKEN, "Bearer \xfc\xfc\xfc"):  # fmt: skip
            headers = {"Authorization": said} if said else {}
            status, replied, _ = await http.ask("POST", path, headers=headers, data='{"all": true}')
            assert status == 401
            assert replied["WWW-Authenticate"] == "Bearer"
    stats = json.loads((await http.get("/stats"))[2])
    assert stats["namespaces"]["kept"]["tiers"]["memory"]["blocks"] == 1
    assert not stats["draining"]


async def test_clear_removes_one_namespace_or_all_and_only_when_told_which(pair, http, context):
    peer = Peer(context, pair[0].endpoint)
    for name in ("a", "b"):
        peer.hello(name)
        peer.put(range(3), namespace=name)
    both = '{"namespace": "a", "all": true}'
    for refused in ("", "{}", "[]", both, '{"all": false}', '{"al": 1}'):
        status, _, text = await http.post("/clear", data=refused)
        assert status == 400 and "namespace" in text
    assert (await http.post("/clear", json={"namespace": "nobody"}))[0] == 404
    status, _, text = await http.post("/clear", json={"namespace": "a"})
    assert (status, json.loads(text)["removed"]["memory"]) == (200, 3)
    spaces = json.loads((await http.get("/stats"))[2])["namespaces"]
    assert [spaces[name]["tiers"]["memory"]["blocks"] for name in "ab"] == [0, 3]
    status, _, text = await http.post("/clear", json={"all": True})
    assert json.loads(text)["removed"]["memory"] >= 3
    spaces = json.loads((await http.get("/stats"))[2])["namespaces"]
    assert sum(one["tiers"]["memory"]["blocks"] for one in spaces.values()) == 0


async def test_a_clear_is_answered_when_no_restart_would_find_the_blocks(
    pair, http, context, monkeypatch
):
    server = pair[0]
    peer = Peer(context, server.endpoint)

    def put(number: int) -> None:
        peer.hello("file", block_bytes=BLOCK_BYTES)
        before = peer.stats().counters["disk_demoted"]
        assert peer.put([number], namespace="file").created == 1
        peer.stats_once(lambda s: s.counters["disk_demoted"] > before)

    put(1)
    with jobs_held(server.tenants[""].storage.disk.pool):
        answer = asyncio.create_task(http.post("/clear", json={"namespace": "file"}))
        await asyncio.sleep(0.05)
        assert not answer.done()
    assert (await answer)[0] == 200
    put(2)
    # The disk does not end.
    monkeypatch.setattr(server.store.tier_stack, "when_gone", lambda then: None)
    monkeypatch.setattr(site, "GONE_S", 0.01)
    status, _, text = await http.post("/clear", json={"namespace": "file"})
    assert status == 500 and "may come back" in text


async def test_without_a_token_set_nothing_can_be_changed_and_the_reason_is_said():
    with served() as (server, admin):
        async with aiohttp.ClientSession() as session:
            status, _, text = await Http(session, admin.url).post("/drain")
            assert status == 403 and "--admin-token-file" in text
            _, _, text = await Http(session, admin.url).get("/metrics")
        assert value_of(text, "kvferry_server_admin_refused_total", reason="no_token_set") == 1
        assert server._drain_until is None


async def test_drain_declines_puts_and_ends_the_server_and_then_nothing_is_alive(tmp_path):
    settings = {"admin_token_file": write_token(tmp_path)}
    with served(**settings) as (server, admin):
        async with aiohttp.ClientSession() as session:
            http = Http(session, admin.url)
            # Something is on its way, so that draining can be seen.
            with copies_held(server):
                busy = server.loop_calls.call(lambda: server.copier.submit(CountedJob([])))
                busy.result(30)
                assert (await http.post("/drain"))[0] == 202
                assert (await http.get("/ready"))[::2] == (503, "draining\n")
                assert (await http.get("/health"))[0] == 200
            assert await asyncio.to_thread(server.wait_until_drained, 30)
            assert (await http.get("/health"))[0] == 503


async def test_where_others_can_reach_it_seeing_takes_the_token_too(tmp_path):
    settings = {"admin": "http://0.0.0.0:*", "admin_token_file": write_token(tmp_path)}
    with served(**settings) as (_, admin):
        url = admin.url.replace("0.0.0.0", "127.0.0.1")
        async with aiohttp.ClientSession() as session:
            http = Http(session, url)
            for path in ("/stats", "/metrics", "/settings"):
                assert (await http.get(path))[0] == 401
                bearer = {"Authorization": f"Bearer {TOKEN}"}
                assert (await http.get(path, headers=bearer))[0] == 200
            for path in ("/", "/health", "/ready"):
                assert (await http.get(path))[0] == 200


# ── what does no harm ────────────────────────────────────────────────────────────────────


async def test_nonsense_is_answered_with_an_error_or_closed_and_nothing_else_suffers(pair, http):
    for sent in (
        b"\0" * 64, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"KVF1 hello\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /clear HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    ):  # fmt: skip
        with raw(pair[1].url, sent) as connection:
            said = await asyncio.to_thread(connection.recv, 1000)
        assert said == b"" or said.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
        assert (await http.get("/health"))[0] == 200


async def test_a_body_that_is_too_long_is_refused_before_it_is_read(pair, http):
    status, _, _ = await http.post("/clear", data=b" " * (site.MAX_BODY_BYTES + 1))
    assert status == 413


# It has the token: the refusal of another ends its connection within a second.
HALF = (b"POST /clear HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
        b"Authorization: Bearer " + TOKEN.encode() + b"\r\n\r\n{")  # fmt: skip
WHOLE = b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n"
SLOW = (b"", b"GET /stats HTT", WHOLE[:-2], HALF)


async def test_a_connection_that_says_nothing_half_a_request_or_reads_nothing_is_closed(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(admin_thread, "PATIENCE_S", 0.1)
    monkeypatch.setattr(admin_thread, "CHECK_S", 0.05)
    with served(admin_token_file=write_token(tmp_path)) as (_, admin):
        for sent in (*SLOW, WHOLE):
            # Closed with something of ours unread, it may look like a reset.
            with raw(admin.url, sent) as connection, suppress(ConnectionResetError):
                while await asyncio.to_thread(connection.recv, 65536):
                    pass


async def test_slow_clients_keep_no_probe_and_no_peer_away(tmp_path, context):
    """Whatever they have sent. Connections beyond the limit are closed, and make no threads."""
    with served(admin_token_file=write_token(tmp_path)) as (server, admin):
        peer = Peer(context, server.endpoint)
        peer.hello()
        peer.put(range(4))
        threads = threading.active_count()
        slow = [raw(admin.url, SLOW[n % 4]) for n in range(admin_thread.MAX_CONNECTIONS)]
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
                http = Http(session, admin.url)
                assert (await http.get("/health"))[::2] == (200, "alive\n")
                assert (await http.get("/ready"))[0] == 200
                status, _, text = await http.get("/stats")
                assert (status, text) == (503, "too many connections\n")
                for sent in SLOW:
                    slow += [raw(admin.url, sent) for _ in range(3 * admin_thread.KEPT_CONNECTIONS)]
                    assert (await http.get("/health"))[0] == 200
                assert len(peer.get(range(4))[1]) == 4
                assert threading.active_count() <= threads + 1
        finally:
            for connection in slow:
                connection.close()


async def test_connections_that_come_in_one_burst_are_counted_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
):
    inside, go_on = threading.Event(), threading.Event()
    summary = site.summary  # type: ignore[attr-defined]

    def held(snapshot: Snapshot) -> dict[str, Any]:
        inside.set()
        assert go_on.wait(60)
        return summary(snapshot)

    monkeypatch.setattr(site, "summary", held)
    asking = b"GET /settings HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served() as (_, admin), contextlib.ExitStack() as open_ones:
        first = open_ones.enter_context(raw(admin.url, asking.replace(b"settings", b"stats")))
        assert await asyncio.to_thread(inside.wait, 60)
        for _ in range(admin_thread.MAX_CONNECTIONS - 1):
            open_ones.enter_context(raw(admin.url))
        last = open_ones.enter_context(raw(admin.url, asking))
        go_on.set()
        assert await asyncio.to_thread(_statuses, [first, last]) == [b"200", b"503"]


def _statuses(connections) -> list[bytes]:
    said = []
    for connection in connections:
        try:
            said.append(connection.recv(65536)[9:12])
        except ConnectionError:
            said.append(b"")
    return said


# ── the loop_calls ─────────────────────────────────────────────────────────────────────────────


def test_a_question_that_fails_fails_the_asker_and_the_loop_goes_on(pair):
    loop_calls = pair[0].loop_calls
    with pytest.raises(ZeroDivisionError):
        loop_calls.call(lambda: 1 / 0).result(30)
    assert loop_calls.call(threading.get_ident).result(30) == pair[0]._thread.ident


def test_too_many_questions_are_refused_and_a_stopped_server_answers_none():
    with served() as (server, _):
        go_on = threading.Event()
        first = server.loop_calls.call(lambda: go_on.wait(60))
        asked = [server.loop_calls.call(lambda: 1) for _ in range(200)]
        refused = [one for one in asked if one.done()]
        assert len(refused) >= 200 - 65
        with pytest.raises(ServerUnavailable):
            refused[0].result()
        go_on.set()
        first.result(30)
        assert sum(one.result(30) for one in asked if one not in refused) == 200 - len(refused)
        server.leave()
        assert server.wait_until_drained(30)
        with pytest.raises(ServerUnavailable):
            server.loop_calls.call(lambda: 1).result(30)


# ── settings ─────────────────────────────────────────────────────────────────────────────


def test_an_address_that_is_none_is_refused_by_name():
    for wrong in ("", "5758", "127.0.0.1", "http://127.0.0.1", "http://127.0.0.1:0",
                  "http://127.0.0.1:70000", "https://127.0.0.1:1", "http://a b:1",
                  "http://127.0.0.1:５７５８", "http://１２７.0.0.1:1"):  # fmt: skip
        with pytest.raises(ConfigError, match=r"^admin: "):
            ServerConfig(admin=wrong)


def test_an_address_that_others_can_reach_needs_a_token_or_to_be_told_that_it_is_insecure():
    with pytest.raises(ConfigError, match=r"admin: http://0.0.0.0:1 can be reached"):
        ServerConfig(admin="http://0.0.0.0:1")
    ServerConfig(admin="http://0.0.0.0:1", insecure=True)
    ServerConfig(admin="http://0.0.0.0:1", admin_token_file="/run/token")
    ServerConfig(admin="off")


def test_an_address_in_use_is_fatal_when_it_was_chosen_and_a_warning_when_it_was_not(
    monkeypatch, caplog
):
    with served() as (_, admin):
        with pytest.raises(ConfigError, match=r"another process listens there"):
            Admin(ServerConfig(admin=admin.url))
        monkeypatch.setattr(values, "ADMIN_DEFAULT", admin.url)
        with Admin(ServerConfig(admin=admin.url)) as second:
            assert second.url == ""
    assert "no admin HTTP: admin: http://127.0.0.1:" in caplog.text


def test_a_token_file_that_cannot_be_meant_is_refused_and_one_that_all_can_read_is_warned_of(
    tmp_path, caplog
):
    for content in ("", "short", "two words are no token", "ü" * 20, "x" * 5000):
        with pytest.raises(ConfigError, match=r"^admin_token_file: "):
            read_token(write_token(tmp_path, content))
    with pytest.raises(ConfigError, match=r"No such file"):
        read_token(str(tmp_path / "none"))
    file = write_token(tmp_path)
    token = read_token(file)
    assert token is not None and not caplog.records
    assert TOKEN not in repr(token)
    (tmp_path / "token").chmod(0o644)
    read_token(file)
    assert "can be read by every user" in caplog.text


def test_the_data_port_is_ready_before_any_http_library_is_imported():
    code = (
        "import sys, remote_server.__main__\n"
        "assert not {'aiohttp', 'prometheus_client', 'torch', 'vllm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
