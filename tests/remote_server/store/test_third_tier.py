"""A third tier appears in every figure by its entry in the list of tiers alone."""

import asyncio

import pytest
from dict_tier import DictTier
from handler_bench import HandlerBench
from metrics_helpers import a_snapshot
from prometheus_client.parser import text_string_to_metric_families

from remote_server import protocol
from remote_server.admin.exposition import exposition
from remote_server.cli import blocks_lines, stats_lines
from remote_server.protocol import Clear, Cleared, Hello, Put, Stats, StatsReply, TierShare
from remote_server.server.snapshot import tiers_of
from remote_server.store.policies import Admission
from remote_server.store.write_behind import Below

CLIENT = b"client"
LENGTH = 4096
BLOCKS = {b"%d" % number: bytes([number]) * LENGTH for number in range(3)}


class Bench(HandlerBench):
    """Three blocks of the namespace `ns`, in memory and in the dictionary below it."""

    def __init__(self) -> None:
        super().__init__([Below(DictTier(1000, at_once=True), Admission())])
        self.ask(Hello(request_id=1, protocol=2, namespace="ns", block_bytes=LENGTH))
        keys, blocks = [*BLOCKS], [*BLOCKS.values()]
        put = Put(
            request_id=2, namespace="ns", keys=keys, lengths=[LENGTH] * 3,
            checksums=protocol.checksums("ns", keys, blocks),
        )  # fmt: skip
        self.ask(put, *blocks)
        self.turn()
        self.store.tier_stack.finish_jobs()

    def ask(self, request: protocol.Request, *payload: bytes) -> protocol.Reply:
        self.handle(CLIENT, [*protocol.encode(request), *payload])
        return self.send_queues.replies[-1][1]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stats_of(bench: Bench) -> StatsReply:
    reply = bench.ask(Stats(request_id=3))
    assert isinstance(reply, StatsReply)
    return reply


def test_stats_name_it_for_the_server_and_for_each_namespace(bench):
    reply = stats_of(bench)
    assert [*reply.tiers] == [*reply.namespaces["ns"].tiers] == ["memory", "dict"]
    assert reply.namespaces["ns"].share("dict") == TierShare(blocks=3, used_bytes=3 * LENGTH)
    assert reply.namespaces["ns"].total.blocks == 6


def test_the_commands_print_it(bench):
    lines = stats_lines.picture(stats_of(bench))
    titles = next(line for line in lines if line.startswith("namespace"))
    assert titles.split() == ["namespace", "block", "blocks", "memory", "dict"]
    assert next(line for line in lines if line.startswith("ns ")).split()[-2:] == ["12.0", "KiB"]
    titles, line, *_ = blocks_lines.report(stats_of(bench), ["ns"], [])
    assert (titles.split()[1:3], line.split()[1:3]) == (["memory", "dict"], ["3", "3"])


def test_clear_counts_and_prints_it(bench):
    reply = bench.ask(Clear(request_id=4, namespace="ns"))
    assert isinstance(reply, Cleared)
    assert reply.removed == {"memory": 3, "dict": 3}
    assert blocks_lines.summary_of(reply) == "removed blocks: 3 from memory, 3 from dict"
    assert stats_of(bench).namespaces["ns"].total == TierShare()


def test_the_metrics_have_a_sample_of_it_under_the_names_of_every_tier(bench):
    snapshot = a_snapshot(
        tiers=tiers_of([bench.store.tier_stats()]), namespaces=bench.store.namespaces.stats(),
        counters={**bench.handlers.counters(), "lookup_pending": 0},
    )  # fmt: skip
    text = asyncio.run(exposition(snapshot, {})).decode()
    found = {
        sample.name.removeprefix("kvferry_server_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("tier") == "dict" and sample.labels.get("outcome") != "hit"
    }
    assert found["namespace_blocks"] == found["tier_blocks"] == 3
    assert found["namespace_bytes"] == 3 * LENGTH
    assert {"evicted_blocks_total", "tier_gets_total", "tier_used_bytes"} <= {*found}
