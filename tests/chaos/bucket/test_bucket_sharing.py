"""Servers that know nothing of each other above one bucket: two write the same packs while a third
sweeps. All sweep, the third as often as it can."""

import time
from collections import Counter

import pytest
from bucket_helpers import folder_url
from bucket_scene import ROWS, bucket_server, prompt, put, states
from chaos_client import ChaosClient
from chaos_server import ChaosServer, eventually
from oracle import MEDIUM
from packs_seen import bucket_of, look_at, packs_of
from s3 import s3_server

pytestmark = pytest.mark.whole

PROMPTS = 40
"""Twice as much as fits into the memory and the disk of a server."""

BUDGET = 8 << 20
WRITER_SPEED, REMOVER_SPEED = 20.0, 60.0
"""A sweep of the whole bucket every three seconds and every second."""


@pytest.fixture(params=["file", "s3"])
def store(request, tmp_path):
    """The address of a bucket and the environment of its servers."""
    if request.param == "file":
        yield folder_url(tmp_path), {}
        return
    with s3_server() as s3:
        yield s3.url, s3.environment


@pytest.fixture
def servers(store, tmp_path):
    """Two writers with directories of their own, and a server that only removes."""
    url, environment = store
    sweeping = ["--bucket-bytes", str(BUDGET)]
    writers = [
        bucket_server(
            url, environment, *sweeping, memory="16MiB", disk=tmp_path / f"disk-{number}",
            disk_bytes="16MiB", speed=WRITER_SPEED,
        )
        for number in range(2)
    ]  # fmt: skip
    remover = bucket_server(url, environment, *sweeping, memory="16MiB", speed=REMOVER_SPEED)
    with writers[0], writers[1], remover:
        yield writers, remover


@pytest.mark.timeout(900)
def test_no_pack_is_torn_no_name_is_left_and_the_budget_is_kept(
    store, servers, request, rng, capsys
):
    writers, remover = servers
    seconds = request.config.getoption("--sharing-s")
    seen: Counter[str] = Counter()
    words: Counter[str] = Counter()
    peak = 0
    with bucket_of(*store) as objects:
        clients = [ChaosClient(writer.endpoint, "tcp") for writer in writers]
        for client in clients:
            client.wait_until_ready()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for _ in range(20):
                words[one_step(rng.choice(clients), prompt(rng.randrange(PROMPTS) * ROWS))] += 1
            seen += look_at(objects)
            peak = max(peak, sum(packs_of(objects).values()))
        for client in clients:
            client.check()
            client.close()
        for writer in writers:
            writer.wait_until_at_rest()
        one_more_sweep(remover)
        left = packs_of(objects)
        assert 0 < sum(left.values()) <= BUDGET
        assert look_at(objects) == {"whole": len(left)}
        for writer in writers:
            one_more_sweep(writer)
            assert writer.stats().counters["bucket_names"] == len(left)
    show(capsys, writers, remover, seen, words, peak)
    assert not seen["torn"]
    assert min(words["hit"], remover.stats().counters["bucket_swept_packs"]) > 0


def one_step(client: ChaosClient, one: range) -> str:
    """What an engine does with a prompt: look it up, read it, or put it when it is not there."""
    if all(states(client, one)):
        return client.finish(client.get(MEDIUM, one))
    return put(client, one)


def one_more_sweep(server: ChaosServer) -> None:
    """Return when a sweep that begins now has ended."""
    before = server.stats().counters["bucket_sweeps"]
    eventually(lambda: server.stats().counters["bucket_sweeps"] >= before + 2, "it sweeps")


def show(capsys, writers, remover, seen, words, peak) -> None:
    counters = [writer.stats().counters for writer in writers]
    names = ("packs_written", "packs_existed", "packs_read", "swept_packs", "dropped_absent")
    counted = {name: [one[f"bucket_{name}"] for one in counters] for name in names}
    removed = remover.stats().counters["bucket_swept_packs"]
    with capsys.disabled():
        print(
            f"\n{seen.total()} looks at packs, {seen['torn']} torn; {dict(words)}; {counted}; "
            f"{removed} removed by the third; at most {peak >> 20} MiB of {BUDGET >> 20}"
        )
