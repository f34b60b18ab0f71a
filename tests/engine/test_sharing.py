"""What is shared, what is not, and that the tests would notice wrong bytes."""

import hashlib
from typing import Any

import pytest
from cluster import BLOCK, PATIENCE_S, ROW_BYTES, Cluster, Engine, declared

from benchmarks.engine.prompts import keys_of
from examples.tiny_model import prompt_tokens
from remote_server.client import GetOutcome
from remote_server.client.lanes.opening import why_slow


def blocks_of(cluster: Cluster, namespace: str, keys: list[bytes]) -> list[bytearray]:
    rows = [bytearray(ROW_BYTES) for _ in keys]
    got = cluster.client.get(
        namespace, keys, [memoryview(row) for row in rows], stall_s=PATIENCE_S, timeout_s=PATIENCE_S
    ).result()
    assert got.outcomes == [GetOutcome.HIT] * len(keys)
    return rows


def test_the_tests_would_notice_altered_blocks(engine: Engine, cluster: Cluster):
    """Blocks altered behind the checksums' back change the answer; put right, it returns."""
    prompt = prompt_tokens(1000, seed=500)
    cold = engine.ask(prompt)
    engine.leave_to_server()
    namespace = declared(cluster.client, engine)
    keys = keys_of(prompt, BLOCK)
    intact = blocks_of(cluster, namespace, keys)
    altered = [bytearray(block) for block in intact]
    for block in altered[3:8]:
        for i in range(1, ROW_BYTES, 8):
            block[i] ^= 0x40

    def replace(blocks: list[bytearray]) -> None:
        put = cluster.client.put(
            namespace, keys, [memoryview(b) for b in blocks], force=True, deferred=False
        ).result()
        assert put.forced == len(keys)

    replace(altered)
    answer, tokens = engine.ask_from(prompt)
    assert tokens["server"] == 31 * BLOCK
    assert not answer.agrees_with(cold), "the model does not look at what it is given"
    replace(intact)
    engine.leave_to_server()
    answer, tokens = engine.ask_from(prompt)
    assert tokens["server"] == 31 * BLOCK
    assert answer.agrees_with(cold)


def test_what_comes_back_is_what_was_stored(engine: Engine, cluster: Cluster):
    """Stored again from blocks that came from the server, the bytes are the same."""
    prompt = prompt_tokens(20 * BLOCK + 3, seed=510)
    engine.ask(prompt, 1)
    engine.leave_to_server()
    namespace = declared(cluster.client, engine)
    keys = keys_of(prompt, BLOCK)
    digest = hashlib.sha256(b"".join(blocks_of(cluster, namespace, keys))).digest()
    _, tokens = engine.ask_from(prompt, 1)
    assert tokens["server"] == 20 * BLOCK
    longer = prompt + prompt_tokens(2 * BLOCK, seed=511)
    engine.ask(longer, 1)
    engine.settle()
    assert len(blocks_of(cluster, namespace, keys_of(longer, BLOCK))) == 22
    again = blocks_of(cluster, namespace, keys)
    assert hashlib.sha256(b"".join(again)).digest() == digest


def test_requests_that_differ_only_in_cache_salt_share_nothing(engine: Engine):
    prompt = prompt_tokens(640, seed=520)
    engine.ask(prompt, 1, cache_salt="alice")
    for salt in ({"cache_salt": "bob"}, {}):
        _, tokens = engine.ask_from(prompt, 1, **salt)
        assert not any(tokens.values()), salt
    engine.leave_to_server()
    _, tokens = engine.ask_from(prompt, 1, cache_salt="mallory")
    assert not any(tokens.values())
    _, tokens = engine.ask_from(prompt, 1, cache_salt="alice")
    assert tokens["server"] == 640


def test_a_second_identical_run_writes_nothing_to_the_server(engine: Engine, cluster: Cluster):
    prompts = [prompt_tokens(700 + 10 * i, seed=530 + i) for i in range(3)]
    for prompt in prompts:
        engine.ask(prompt, 1)
    engine.leave_to_server()
    before = cluster.stats().counters
    for prompt in prompts:
        engine.ask(prompt, 1)
    engine.leave_to_server()
    after = cluster.stats().counters
    assert after["get_hit"] > before["get_hit"]
    assert after["put_created"] == before["put_created"]
    assert after["bytes_in"] == before["bytes_in"]


def test_the_engines_metrics_count_a_remote_hit(engine: Engine, cluster: Cluster):
    prompt = prompt_tokens(640 + 9, seed=540)
    engine.ask(prompt, 1)
    engine.leave_to_server()
    before = engine.metric("kvferry_loaded_bytes_total"), cluster.counter("get_hit")
    bytes_before = cluster.stats().counters
    _, tokens = engine.ask_from(prompt, 1)
    assert tokens["server"] == 640
    assert engine.metric("kvferry_loaded_bytes_total") - before[0] == 20 * ROW_BYTES
    assert cluster.counter("get_hit") - before[1] == 20
    if not why_slow():
        moved = {name: n - bytes_before[name] for name, n in cluster.stats().counters.items()}
        assert moved["lane_bytes_out"] == 20 * ROW_BYTES > moved["bytes_out"]
    assert engine.metric("kvferry_server_ready") == 1
    assert engine.metric("kvferry_hook_errors_total") == 0


@pytest.mark.parametrize(
    ("options", "stored", "loaded"),
    [({"store": False}, False, True), ({"load": False}, True, False)],
)
def test_a_request_can_opt_out(engine: Engine, options: dict[str, Any], stored: bool, loaded: bool):
    params = {"kv_transfer_params": {"kvferry": options}}
    prompt = prompt_tokens(320 + 5, seed=550 + stored)
    engine.ask(prompt, 1, **params)
    engine.forget()
    _, tokens = engine.ask_from(prompt, 1)
    assert tokens["pool"] == (320 if stored else 0)
    engine.forget()
    _, tokens = engine.ask_from(prompt, 1, **params)
    assert tokens["pool"] == (320 if loaded else 0)
