"""A server has a name and refuses those that use another one; its load is what it holds."""

import logging
from typing import Any

import pytest
from handler_bench import HandlerBench

from remote_server import protocol
from remote_server.protocol import EngineReport, Hello, Lookup, Put, ServerLoad, Stats, Welcome
from remote_server.server.reports.identity import LOAD_S, MOST_NAMES, default_name
from remote_server.store.use_times import MOST_MOMENTS, UseTimes
from remote_server.values import KiB

pytestmark = pytest.mark.real_time

FLEET = "0123456789abcdef"
BLOCK_BYTES = 16 * KiB


class Named(HandlerBench):
    def __init__(self) -> None:
        super().__init__()
        self.tier._use_times = UseTimes(self.clock, 0)

    def hello(self, *, server: str = "", fleet: str = "", client: str = "") -> protocol.Reply:
        hello = Hello(
            request_id=1, protocol=2, namespace="ns", block_bytes=BLOCK_BYTES, client=client,
            server=server, fleet=fleet,
        )  # fmt: skip
        return self.ask(hello, client=client.encode() or b"c")

    def put(self, number: int, *, fleet: bool = True) -> protocol.Stored:
        block = bytes(BLOCK_BYTES)
        stored = self.ask(Put(
            request_id=2, namespace="ns", keys=[b"%d" % number], lengths=[BLOCK_BYTES],
            checksums=[], fleet=fleet,
        ), block)  # fmt: skip
        self.settle()
        assert isinstance(stored, protocol.Stored)
        return stored

    def load(self) -> ServerLoad:
        """As it is measured now."""
        self.now += LOAD_S
        found = self.ask(Lookup(request_id=3, namespace="ns", keys=[b"?"], fleet=True))
        assert isinstance(found, protocol.Found) and found.load is not None
        return found.load


@pytest.fixture
def server() -> Named:
    return Named()


@pytest.mark.parametrize("given", ["", "cache-1"])
def test_a_hello_without_a_name_or_with_the_right_one_is_welcome(server: Named, given: str):
    welcome = server.hello(server=given)
    assert isinstance(welcome, Welcome) and welcome.name == "cache-1"


def test_a_hello_with_another_name_is_refused_in_words_and_logged_once(
    server: Named, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        refused = server.hello(server="cache-2\x1b", client="engine-1")
        assert isinstance(refused, protocol.Error) and refused.code == "wrong_server"
        assert refused.message == (
            "this server has the name 'cache-1', and the client's list calls it 'cache-2\\\\x1b': "
            "correct the list, or start the server with --name cache-2\\x1b"
        )
    assert "ns" not in server.store.namespaces.known
    assert caplog.messages == [f"refused engine-1: {refused.message}"]


def test_only_clients_with_a_list_get_the_load(server: Named):
    plain, of_fleet = server.hello(), server.hello(fleet=FLEET)
    assert isinstance(plain, Welcome) and isinstance(of_fleet, Welcome)
    assert plain.load is None and of_fleet.load is not None
    assert server.put(1, fleet=False).load is None and server.put(2).load is not None
    assert server.ask(Lookup(request_id=3, namespace="ns", keys=[b"?"])).load is None  # type: ignore[union-attr]


def test_the_fill_is_the_used_part_of_the_budget_in_thousandths(server: Named):
    server.hello()
    assert server.load().fill == 0
    server.put(1)
    stats = server.tier.stats()
    assert stats.used_bytes >= BLOCK_BYTES
    assert server.load().fill == 1000 * stats.used_bytes // stats.budget_bytes > 0


def test_the_age_is_the_time_since_the_last_use_of_the_block_evicted_last(server: Named):
    server.hello()
    number = 0
    while server.tier.counters()["evicted"] == 0:
        assert server.load().evicted_age_s == -1
        server.now += 10
        server.put(number)
        number += 1
    first_evicted_s = 10 * (number - 1) + LOAD_S * (number - 1)
    assert server.load().evicted_age_s == pytest.approx(first_evicted_s, abs=0.3)
    server.now += 1000
    grown_s = server.load().evicted_age_s
    assert grown_s == pytest.approx(1000 + first_evicted_s, abs=1), "nothing is evicted meanwhile"
    server.store.memory.touch_all("ns", [b"1"])  # the next one is now block 2
    server.put(number)
    stayed_s = server.load().evicted_age_s
    assert stayed_s == pytest.approx(1000 + first_evicted_s - 20, abs=1)


def test_a_draining_server_says_so_at_once(server: Named):
    server.hello()
    assert not server.load().draining
    server.handlers.draining = True
    assert server.put(1).load == ServerLoad(0, -1.0, pytest.approx(0.1), draining=True)


def test_the_load_is_measured_at_most_ten_times_a_second(server: Named):
    server.hello()
    before = server.load()
    server.put(1)
    assert server.put(2).load == before
    server.now += LOAD_S
    assert server.put(3).load != before


def test_statistics_have_the_name_and_the_lists_of_connected_clients(server: Named):
    server.hello(fleet=FLEET, client="engine-2")
    server.hello(fleet=FLEET, client="engine-1")
    server.hello(fleet="f" * 16, client="engine-3")
    server.hello(client="plain")

    def fleets() -> dict[str, list[str]]:
        reply = server.ask(Stats(request_id=4))
        assert isinstance(reply, protocol.StatsReply) and reply.name == "cache-1"
        return reply.fleets

    assert fleets() == {FLEET: ["engine-1", "engine-2"], "f" * 16: ["engine-3"]}
    server.handlers.identity.gone(b"engine-3")
    server.hello(fleet="a" * 16, client="engine-2")  # its list has changed
    assert fleets() == {FLEET: ["engine-1"], "a" * 16: ["engine-2"]}
    for number in range(2 * MOST_NAMES):
        server.hello(fleet="b" * 16, client=f"engine-{number}")
    assert len(fleets()["b" * 16]) == MOST_NAMES
    server.handlers.identity.all_gone()
    assert fleets() == {}


def reporting(name: str, namespace: str = "ns", **report: Any) -> Hello:
    return Hello(
        request_id=1, protocol=2, namespace=namespace, block_bytes=BLOCK_BYTES, client=name,
        report=EngineReport(**report),
    )  # fmt: skip


def test_an_engine_is_known_by_its_last_report_while_it_is_connected(server: Named):
    server.hello(client="no engine")
    for tokens in (0, 100):
        hello = reporting("a", software="vLLM 0.32.0", prompt_tokens=tokens, reused={"pool": 10})
        server.ask(hello, client=b"a")
    server.ask(reporting("b", "other"), client=b"b")
    a, b = server.handlers.identity.engines()
    assert (a.client, a.namespace, a.software) == ("a", "ns", "vLLM 0.32.0")
    assert (a.prompt_tokens, a.reused) == (100, {"pool": 10})
    assert (b.client, b.namespace, b.prompt_tokens) == ("b", "other", 0)
    server.hello(client="a")
    assert server.handlers.identity.engines() == [a, b], "a ping without a report changes nothing"
    server.handlers.identity.gone(b"a")
    assert server.handlers.identity.engines() == [b]
    server.handlers.identity.all_gone()
    assert server.handlers.identity.engines() == []


@pytest.mark.parametrize(
    "report", [{"software": "vLLM\x1b[2J"}, {"reused": {"po\nol": 1}}], ids=["software", "level"]
)
def test_a_report_that_would_write_to_a_terminal_is_refused(server: Named, report: Any):
    refused = server.ask(reporting("a", **report))
    assert isinstance(refused, protocol.Error) and refused.code == "bad_request"
    assert server.handlers.identity.engines() == [] and not server.store.namespaces.known


@pytest.mark.parametrize("digest", ["0123456789ABCDEF", "0", "0123456789abcdef0", "x" * 16])
def test_a_digest_that_is_none_is_a_bad_message(server: Named, digest: str):
    refused = server.hello(fleet=digest)
    assert isinstance(refused, protocol.Error) and refused.code == "bad_message"


def test_the_name_of_a_host_is_its_first_label():
    assert default_name("kvferry-3.kvferry.default.svc") == "kvferry-3"
    assert default_name("a b") == default_name("") == default_name("-") == "kvferry"
    assert default_name()


# ── times of uses ────────────────────────────────────────────────────────────────────────


def test_ages_are_exact_to_a_tenth_of_a_second_for_minutes_and_begin_with_the_start():
    now = [0.0]
    times = UseTimes(lambda: now[0], 1000)
    for number in range(1, 3000):
        now[0] = number * 0.1
        times.used(1000 + number)
    times.evicted(2000)
    assert times.evicted_age_s == pytest.approx(199.9, abs=0.1)
    times.evicted(3)
    assert times.evicted_age_s == pytest.approx(299.9, abs=0.1)


def test_ages_of_days_need_no_more_memory_and_stay_near():
    now = [0.0]
    times = UseTimes(lambda: now[0], 0)
    for number in range(1, 100_000):
        now[0] = number * 1.0
        times.used(number)
    assert len(times._numbers) <= MOST_MOMENTS
    for used in (10, 5_000, 50_000, 99_000, 99_990):
        times.evicted(used)
        assert times.evicted_age_s == pytest.approx(99_999 - used, rel=0.05, abs=1.1), used
