"""The trace replay: what is counted, what is possible, and that a real server finds the same."""

import csv
import itertools
import json
import random
import re

import pytest
from synthetic_trace import write

from benchmarks.harness.record import Record
from benchmarks.remote_kv_cache import test_trace as trace_benchmark
from benchmarks.remote_kv_cache.replay.caches.candidates import POLICIES
from benchmarks.remote_kv_cache.replay.caches.model_tier import model_tier
from benchmarks.remote_kv_cache.replay.caches.optimum import next_uses, optimum, without_limit
from benchmarks.remote_kv_cache.replay.caches.room import disk_for, memory_for, require_size
from benchmarks.remote_kv_cache.replay.caches.server_model import ServerModel
from benchmarks.remote_kv_cache.replay.levels import progress
from benchmarks.remote_kv_cache.replay.levels.driver import Replay, WrongBlock
from benchmarks.remote_kv_cache.replay.requests import recorded
from benchmarks.simulated.tiered_pool import TieredPool
from remote_server.errors import ConfigError
from remote_server.store.eviction.lru import LRU
from remote_server.store.memory.slabs import Slabs
from remote_server.traces import Request, distinct


def prompts(*paths: str) -> tuple[Request, ...]:
    """One request a second; each letter is a block, named by all before it."""
    number = {}
    return tuple(
        Request(
            float(second), len(path) * 512, 1,
            tuple(number.setdefault(path[:end], len(number)) for end in range(1, len(path) + 1)),
        )
        for second, path in enumerate(paths)
    )  # fmt: skip


def random_prompts(
    count: int, seed: int, letters: str = "ab", longest: int = 3
) -> tuple[Request, ...]:
    chance = random.Random(seed)
    return prompts(
        *("".join(chance.choices(letters, k=chance.randint(1, longest))) for _ in range(count))
    )


def test_the_benchmarks_model_larger_blocks_of_a_trace_of_small_ones(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    turns = [(0, 1100), (9, 2048), (1, 0)]
    path.write_text("".join(
        json.dumps({
            "timestamp": second, "input_length": tokens, "output_length": 1, "chat_id": 1,
            "hash_ids": [*range(-(-tokens // 16))],
        }) + "\n"
        for second, tokens in turns
    ))  # fmt: skip
    first, empty, second = recorded.read(path)
    assert len(first.blocks) == 2 and first.blocks == second.blocks[:2] and len(second.blocks) == 4
    assert not empty.blocks
    assert "earlier than the line before" in caplog.text


def best_of_all(requests: tuple[Request, ...], capacity: int) -> int:
    """Every choice of what to keep, tried: the definition itself, and slow."""

    def leading(kept: frozenset[int], blocks: tuple[int, ...]) -> int:
        return sum(1 for _ in itertools.takewhile(kept.__contains__, blocks))

    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, found in reached.items():
            total = found + leading(kept, request.blocks)
            there = kept | set(request.blocks)
            for size in range(min(capacity, len(there)) + 1):
                for choice in itertools.combinations(sorted(there), size):
                    key = frozenset(choice)
                    after[key] = max(after.get(key, 0), total)
        reached = after
    return max(reached.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_optimum_is_the_best_of_all_choices_of_what_to_keep(seed):
    requests = random_prompts(7, seed)
    uses = next_uses(requests)
    for capacity in range(6):
        assert optimum(requests, capacity, uses) == best_of_all(requests, capacity)


def test_blocks_behind_one_that_is_missing_are_not_found():
    requests = prompts("ab", "xy", "ab")
    assert without_limit(requests) == 2
    assert without_limit(prompts("ab", "b", "cb")) == 0
    assert optimum(requests, 1, next_uses(requests)) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_finds_more_than_the_optimum_nor_keeps_more_than_its_places(policy):
    requests = random_prompts(500, 5, "abcde", 5)
    uses = next_uses(requests)
    for capacity in (3, 17, 60):
        model = ServerModel(capacity, 0, POLICIES[policy])
        found = 0
        for request in requests:
            held = [*itertools.takewhile(model.holds, request.blocks)]
            found += len(model.get(held))
            model.put(request.blocks)
            model.check()
        assert 0 < found <= optimum(requests, capacity, uses)


def test_the_head_of_a_prompt_outlives_its_end_in_memory():
    model = ServerModel(4, 0, LRU)
    model.put("abc")
    model.put("xy")
    assert [key for key in "abcxy" if model.holds(key)] == ["a", "b", "x", "y"]
    model.get("ab")
    model.put("q")
    assert not model.holds("y")
    model.put("r")
    model.put("s")
    assert [key for key in "abxqrs" if model.holds(key)] == [*"aqrs"]


def test_what_only_the_disk_has_is_in_memory_after_a_get_and_counted_as_the_disks():
    model = ServerModel(2, 10, LRU)
    model.put("abcd")
    assert [key for key in "abcd" if key in model.memory] == ["a", "b"]
    assert model.get("abcde") == [*"abcd"]
    assert (model.from_memory, model.from_disk) == (2, 2)
    model.check()


@pytest.mark.parametrize("blocks", [1, 100, 1024, 5000, 170_899])
@pytest.mark.parametrize("payload", [64, 1024, 8192])
def test_a_server_of_that_size_has_the_places_that_are_said(blocks, payload):
    room = memory_for(blocks, payload)
    slabs = Slabs(room.num_bytes)
    size_class = slabs.size_class(payload)
    while slabs.free:
        slabs.cut(size_class)
    assert room.places == sum(slab.num_slots for slab in slabs.slabs) >= blocks
    assert disk_for(blocks, payload).places >= blocks
    assert disk_for(0, payload) == (0, 0)


def replayed(requests, model, *, pool=64, eviction="lru", **more):
    tiered = TieredPool(pool, 16, 512, model_tier(model), eviction=eviction)
    replay = Replay(tiered, moves_bytes=False, **{"pause": lambda _: None, **more})
    return tiered, replay


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_with_room_for_everything_a_replay_finds_what_is_counted_over_the_trace(tmp_path, eviction):
    requests = recorded.read(write(tmp_path / "trace.jsonl", 200))
    model = ServerModel(distinct(requests), 0, LRU)
    pool, replay = replayed(requests, model, pool=96, eviction=eviction)
    found = replay.run(requests)
    pool.check()
    model.check()
    pool.close()
    assert found.hits == without_limit(requests)
    assert found.from_pool > 0
    assert found.from_server > 0
    assert (found.requests, found.blocks) == (200, sum(len(each.blocks) for each in requests))
    assert found.unstored == 0


def test_at_a_speed_up_requests_wait_for_their_time_and_how_late_each_was_is_kept():
    now, slept = [100.0], []

    def pause(seconds: float) -> None:
        slept.append(seconds)
        now[0] += 0.25

    requests = prompts("ab", "abc", "x", "xy")
    pool, replay = replayed(requests, ServerModel(50, 0, LRU), clock=lambda: now[0], pause=pause)
    found = replay.run(requests, speed_up=2.0)
    pool.close()
    assert found.requests == 4
    assert len(found.late_s) == 4
    assert all(0 <= late < 1.0 for late in found.late_s)
    assert now[0] >= 100.0 + requests[-1].arrival_s / 2.0


def test_a_row_that_holds_another_block_than_it_says_ends_the_replay():
    model = ServerModel(50, 0, LRU)
    pool = TieredPool(16, 16, 512, model_tier(model))
    replay = Replay(pool, pause=lambda _: None)  # a model moves no bytes, and this one looks
    requests = prompts("ab", *("xyz"[n % 3] + str(n) for n in range(40)), "ab")
    with pytest.raises(WrongBlock, match="another block"):
        replay.run(requests)
    pool.close()


SMALL = [
    "--model", "tiny", "--pool", "64MiB", "--payload", "64KiB", "--server-memory", "64MiB,all",
    "--wire-memory", "64MiB,all",
]  # fmt: skip


@pytest.mark.real_time
def test_a_real_server_finds_what_its_policy_says_block_for_block(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl.gz", 90)
    status = trace_benchmark.main([
        "--trace", str(trace), *SMALL, "--wire-memory", "64MiB", "--server-disk", "0,128MiB",
        "--transport", "tcp", "--json", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv"),
        "--plot", str(tmp_path / "r.svg"),
    ])  # fmt: skip
    said = capsys.readouterr().out
    assert status == 0, said
    assert "Traceback" not in said
    figures = {each.name: each.values for each in Record.read(tmp_path / "r.json").figures}
    wire = {name: values for name, values in figures.items() if name.startswith("wire")}
    assert len(wire) == 2
    for name, values in wire.items():
        store = figures[name.replace("wire", "store")]
        assert values["found"] == store["found"] > 0, (name, values)
        assert values["pool"] == store["pool"], name
        assert not {key for key in values if key.startswith(("missed", "not put", "hook"))}, values
    by_disk = [values["disk"] for name, values in wire.items() if "disk none" not in name]
    assert by_disk[0] > 0
    counted = figures["counted over the trace, nothing ever leaves"]["found"]
    everything = [values["found"] for values in figures.values() if values["found"] == counted]
    assert len(everything) >= 4  # the count itself, and each replay with room for everything
    assert "room for everything: counted over the trace" in said
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 1 + sum(
        name.startswith(("wire", "store")) for name in figures
    )
    assert (tmp_path / "r.svg").exists()


def test_after_ctrl_c_what_was_replayed_is_written_and_said_to_be_part(
    tmp_path, capsys, monkeypatch
):
    def stop(self: object, done: int) -> None:
        if done == 60:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Progress, "__call__", stop)
    trace = write(tmp_path / "trace.jsonl", 100)
    status = trace_benchmark.main([
        "--trace", str(trace), *SMALL, "--replay", "store", "--json", str(tmp_path / "r.json"),
    ])  # fmt: skip
    assert status == 130
    assert "interrupted after 59 requests" in capsys.readouterr().out
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["interrupted"]
    replays = [each for each in record["figures"] if each["name"].startswith("store")]
    assert [each["values"]["requests"] for each in replays] == [59]


def test_a_replay_that_finds_something_else_than_is_counted_fails(tmp_path, capsys, monkeypatch):
    trace = write(tmp_path / "trace.jsonl", 100)
    monkeypatch.setattr(trace_benchmark, "without_limit", lambda requests: 1)
    status = trace_benchmark.main([
        "--trace", str(trace), *SMALL, "--replay", "store", "--server-memory", "all",
        "--policies", "lru", "--pool-policies", "lru",
    ])  # fmt: skip
    assert status == 1
    assert "FAILED: store replay, room for everything" in capsys.readouterr().out


def test_a_pool_too_small_for_a_prompts_puts_is_refused(tmp_path, capsys):
    trace = write(tmp_path / "trace.jsonl", 100)
    status = trace_benchmark.main(["--trace", str(trace), "--model", "tiny", "--pool", "8MiB"])
    assert status == 2
    assert "--pool: 16 blocks; the longest prompt has" in capsys.readouterr().err


@pytest.mark.parametrize("replay", ["store", "both"])
@pytest.mark.parametrize("size_mib", [1, 5, 37, 64])
def test_the_policies_alone_have_the_memory_and_the_disk_that_were_named(
    tmp_path, capsys, monkeypatch, replay, size_mib
):
    """Of any size: a small block on the wire makes no small server large."""
    trace, file = write(tmp_path / "trace.jsonl", 60), tmp_path / "r.json"
    status = trace_benchmark.main([
        "--trace", str(trace), "--model", "tiny", "--pool", "64MiB", "--replay", replay,
        "--server-memory", f"{size_mib}MiB", "--server-disk", f"0,{2 * size_mib}MiB",
        "--wire-memory", "all", "--policies", "lru", "--pool-policies", "lru", "--csv",
        str(tmp_path / "r.csv"), "--json", str(file),
    ])  # fmt: skip
    assert status == 0, capsys.readouterr().err
    with (tmp_path / "r.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["replay"] == "store"]
    block_bytes = json.loads(file.read_text())["parameters"]["block_bytes"]
    blocks = (size_mib << 20) // block_bytes
    sizes = {(int(row["memory_blocks"]), int(row["disk_blocks"])) for row in rows}
    assert sizes == {(blocks, 0), (blocks, 2 * blocks)}


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--replay", "wire", "--server-memory", "8MiB"], "--server-memory: 16 blocks"),
        (["--replay", "both", "--wire-memory", "8MiB"], "--wire-memory: 16 blocks"),
        (["--replay", "wire", "--server-memory", "256MiB", "--server-disk", "8MiB", "--payload",
          "4096"], "--server-disk: 16 blocks"),
        (["--servers", "2", "--wire-memory", "16MiB"], "--wire-memory, 2 servers, each: 16 blocks"),
        (["--replay", "wire", "--eviction", "lru", "--capacity", "8MiB"], "--capacity: 16 blocks"),
    ],
)  # fmt: skip
def test_a_size_that_no_real_server_has_is_refused_and_not_enlarged(
    tmp_path, capsys, arguments, option
):
    trace = write(tmp_path / "trace.jsonl", 300)
    given = ["--trace", str(trace), "--model", "tiny", "--pool", "64MiB", *arguments]
    assert trace_benchmark.main(given) == 2
    said = capsys.readouterr().err
    assert option in said and "the smallest real server has room for" in said
    assert "--replay store" in said


@pytest.mark.parametrize("payload", [16, 1024, 64 << 10])
@pytest.mark.parametrize("blocks", [1, 16, 292, 585, 1170, 4681])
def test_a_payload_that_is_recommended_is_enough(blocks, payload):
    for room_for in (memory_for, disk_for):
        try:
            require_size("--size", blocks, payload, room_for)
        except ConfigError as error:
            if found := re.search(r"--payload (\d+)", str(error)):
                require_size("--size", blocks, int(found[1]), room_for)
        else:
            assert room_for(blocks, payload).places <= 9 * blocks // 8
