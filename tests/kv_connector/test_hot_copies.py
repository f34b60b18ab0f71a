"""A run that many engines load gets a second copy, made by one that has its rows in the pool."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_server import eventually
from fleet_scene import Scene, all_ready
from scripted_client import BLOCK_BYTES, TOKENS_PER_BLOCK, Clock, Engine
from scripted_fleet import fleet_engine, landed, pool_with
from tiered_engine import UNHURRIED, TieredEngine, key_of

from kv_connector import metrics
from kv_connector.hot_copies import MOST_DUE, REST_S, HotCopies
from kv_connector.metrics import TierCounters
from kv_connector.transfer_ends import Ended, failed
from remote_server.client import ClientConfig, PutResult, RemoteClient
from remote_server.fleet.fleet import Fleet
from remote_server.fleet.placement import homes
from remote_server.fleet.server_list import WatchedList
from remote_server.protocol import KeyState, PutOutcome
from remote_server.server import hot_keys

pytestmark = pytest.mark.real_time

FIRST, NEXT = 1024 // TOKENS_PER_BLOCK, 2048 // TOKENS_PER_BLOCK
"""The rows that begin the second and the third run of a prompt."""


def engine_of(num_rows: int) -> Engine:
    """It has seen all servers."""
    engine = fleet_engine(num_rows, break_even=False)
    engine.tier.serve_external_requests(pool_with())
    return engine


@pytest.fixture
def engine() -> Engine:
    return engine_of(400)


def loaded(engine: Engine, first: int, last: int, *hot: int, name: str = "r") -> list[Any]:
    """A load of the rows first to last of a long prompt has ended. Gives all keys of the prompt."""
    context, keys = engine.request(name, NEXT + 8)
    engine.tier.submit_load(engine.job(context, keys[first:last], range(first, last)))
    landed(engine.client.last("get"), hot=[row - first for row in hot])
    engine.finished()
    return keys


def served(engine: Engine, *in_pool: bytes) -> None:
    engine.clock.now += 1.0
    engine.tier.serve_external_requests(pool_with(*in_pool))


def put_ends(engine: Engine, outcome: PutOutcome | None) -> None:
    put = engine.client.last("put")
    put.reply.set_result(PutResult(outcomes=[outcome] * len(put.keys)))
    engine.finished()


def copies(engine: Engine, outcome: str) -> int:
    return engine.tier.counters.totals().get((metrics.HOT_COPIES, outcome), 0)


def test_all_rows_of_a_hot_run_that_are_in_the_pool_are_offered_without_a_lookup(engine: Engine):
    keys = loaded(engine, FIRST - 4, FIRST + 10, FIRST)
    served(engine, *keys[:-20])
    assert engine.client.count("lookup") == 0, "it would find the run"
    put = engine.client.last("put")
    assert put.hot and put.keys == keys[FIRST:-20]
    assert len(put.keys) > 14, "also those that were in the pool before the load"
    assert set(put.anchors) == {keys[FIRST]}
    assert [(one.start, one.rows) for one in put.chain] == [(1024, len(put.keys))]
    put_ends(engine, PutOutcome.CREATED)
    assert copies(engine, "created") == len(put.keys)
    assert copies(engine, "left_pool") == len(keys[FIRST:NEXT]) - len(put.keys)
    assert not engine.tier.has_pending_work()


def test_a_run_that_is_not_hot_is_not_copied(engine: Engine):
    keys = loaded(engine, 0, FIRST + 10)
    served(engine, *keys)
    assert engine.client.count("put") == 0 and not engine.tier.has_pending_work()


def test_what_no_server_holds_comes_first(engine: Engine):
    context, lost = engine.request("lost", 3)
    engine.client.ready = False
    engine.tier.submit_store(engine.job(context, lost, range(3)))
    engine.finished()
    engine.client.ready = True
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    assert engine.client.last("lookup").keys == lost
    engine.client.last("lookup").found(*[KeyState.ABSENT] * 3)
    assert engine.client.last("put").keys == lost and not engine.client.last("put").hot
    assert engine.tier.has_pending_work(), "an idle engine goes on with the copies"
    engine.client.last("put").stored()
    engine.finished()
    served(engine, *keys)
    assert engine.client.last("put").keys == keys[FIRST:NEXT]


def test_a_run_that_goes_on_being_hot_is_offered_once_a_minute(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    put_ends(engine, PutOutcome.EXISTED)
    assert copies(engine, "existed") == NEXT - FIRST
    loaded(engine, FIRST, FIRST + 4, FIRST, name="again")
    served(engine, *keys)
    assert engine.client.count("put") == 1
    engine.clock.now += REST_S
    loaded(engine, FIRST, FIRST + 4, FIRST, name="later")
    served(engine, *keys)
    assert engine.client.count("put") == 2


def test_a_copy_that_fails_is_not_offered_again(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    served(engine, *keys)
    put_ends(engine, None)
    assert copies(engine, "failed") == NEXT - FIRST
    for _ in range(3):
        served(engine, *keys)
    assert engine.client.count("put") == 1 and not engine.tier.has_pending_work()


def test_a_long_run_is_copied_in_batches_at_the_pace_of_backfill():
    engine = engine_of(80)
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    sent: list[bytes] = []
    while engine.tier.has_pending_work():
        served(engine, *keys)
        put = engine.client.last("put")
        assert len(put.keys) <= 10, "of 20 rows that puts may pin, half"
        put_ends(engine, PutOutcome.CREATED)
        sent += put.keys
    assert sent == keys[FIRST:NEXT]


def test_a_weight_epoch_ends_all_copies(engine: Engine):
    keys = loaded(engine, FIRST, FIRST + 4, FIRST)
    context, _ = engine.request("r2", NEXT)
    engine.tier.submit_load(engine.job(context, keys[:4], range(4)))
    engine.tier.enter_epoch("another")
    landed(engine.client.last("get"), hot=[0])
    engine.finished()
    served(engine, *keys)
    assert engine.client.count("put") == 0 and not engine.tier.has_pending_work()


def test_a_vllm_without_positions_copies_the_first_row_alone(engine: Engine):
    context, keys = engine.request("r", 4)
    del context._offload_key_positions
    context.get_offload_key_position = lambda _: None
    engine.tier.on_new_request(context)
    engine.tier.submit_load(engine.job(context, keys, range(4)))
    landed(engine.client.last("get"), hot=[0])
    engine.finished()
    served(engine, *keys)
    assert engine.client.last("put").keys == keys[:1] and engine.client.last("put").hot


def test_the_rows_that_wait_are_bounded():
    counters = TierCounters()
    hot = HotCopies(counters, Clock())
    anchors: Any = [b"%d" % number for number in range(MOST_DUE + 7)]
    hot.load_ended(Ended(failed(1), hot=anchors, is_load=True))
    assert len(hot) == MOST_DUE and list(hot.take(1)) == [b"7"]
    assert counters.totals()[metrics.HOT_COPIES, "overflow"] == 7


# ── on real servers ──────────────────────────────────────────────────────────────────────────


def test_the_fifth_engine_that_loads_a_run_gives_it_to_the_other_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hot_keys, "WITHIN_S", 3600.0)
    blocks = range(FIRST + 4)
    with ExitStack() as stack:
        scene = Scene(tmp_path, stack)
        names = [scene.start(f"kvferry-{number}").config.name for number in range(4)]
        addresses = [scene.address(name) for name in names]

        def engine(name: str) -> TieredEngine:
            def fleet_of(config: ClientConfig) -> Fleet:
                return Fleet(WatchedList(addresses), config)

            made = TieredEngine(
                80, client_factory=fleet_of, name=name, break_even=False, **UNHURRIED
            )
            stack.callback(made.tier.shutdown)
            eventually(lambda: all_ready(made.client), "the servers are ready")
            return made

        writer = engine("writer")
        keys = writer.compute("r", blocks)
        writer.idle()
        (namespace,) = writer.client.stats(timeout_s=60).result().namespaces
        first = [names[place] for place in homes(names, namespace, key_of(0))]
        assert len(holders(scene, namespace, keys[:FIRST])) == 1
        readers = [engine(f"reader-{number}") for number in range(5)]
        for number, reader in enumerate(readers):
            assert len(holders(scene, namespace, keys[:FIRST])) == 1
            context, _ = reader.request("r", blocks)
            assert reader.run(context, keys) == ["HIT"] * len(keys)
            reader.manager.on_request_finished(context)
            reader.idle()
            assert reader.counted(metrics.HOT_COPIES, "created") == 0 or number == 4
        assert reader.counted(metrics.HOT_COPIES, "created") == len(keys), "two runs, both hot"
        assert sorted(holders(scene, namespace, keys[:FIRST])) == sorted(first)
        for each in (writer, *readers):
            each.check()


def holders(scene: Scene, namespace: str, keys: list[Any]) -> list[str]:
    """The servers that have all of these rows."""
    found = []
    for name, server in scene.servers.items():
        states = states_on(server.endpoint, namespace, keys)
        assert states in ({KeyState.READABLE}, {KeyState.ABSENT}), "all of a run or nothing"
        found += [name] if KeyState.READABLE in states else []
    return found


def states_on(endpoint: str, namespace: str, keys: list[Any]) -> set[int]:
    client = RemoteClient(ClientConfig(endpoint))
    client.declare(namespace, BLOCK_BYTES)
    try:
        eventually(lambda: client.ready, "the server is ready")
        return set(client.lookup(namespace, keys, timeout_s=60).result().states)
    finally:
        client.close()
