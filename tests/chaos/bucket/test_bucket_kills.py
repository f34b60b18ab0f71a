"""kill -9 in the middle of PUTs to an object store."""

import pytest
from bucket_scene import (
    ALL_THERE,
    PACKS,
    ROWS,
    behind,
    bucket_server,
    chain_of,
    prompt,
    put,
    states,
)
from chaos_client import ChaosClient
from chaos_server import eventually
from http_faults import StoreFaults
from oracle import MEDIUM
from packs_seen import bucket_of, look_at, packs_of
from s3 import s3_server
from store_proxy import StoreProxy

pytestmark = pytest.mark.whole

KILLS = 12
PROMPTS = 2
"""Put before each kill: their packs are written at the same time."""


@pytest.mark.timeout(300)
def test_a_put_that_a_kill_cuts_is_never_read_and_the_next_server_offers_its_pack_again(
    tmp_path, rng, seed, capsys
):
    torn, cut = 0, 0
    with s3_server() as store, StoreProxy(store.address, seed) as proxy:
        server = bucket_server(store.url, behind(proxy, store), disk=tmp_path / "disk")
        witness = bucket_server(store.url, store.environment)
        with server, witness, bucket_of(store.url, store.environment) as objects:
            for number in range(KILLS):
                prompts = [prompt((number * PROMPTS + n) * ROWS) for n in range(PROMPTS)]
                proxy.set(StoreFaults(catch_put=rng.uniform(0.01, 1.0)))
                before = proxy.counts()["caught"]
                fill(server, prompts)
                eventually(lambda: proxy.counts()["caught"] > before, "a PUT is cut")  # noqa: B023
                cut += proxy.counts()["caught"] - before
                server.kill()
                proxy.clear()
                torn += look_at(objects)["torn"]
                read_all(witness, prompts)
                server.restart()
                offer_again(server, prompts, num_packs=(number + 1) * PROMPTS * PACKS)
                eventually(
                    lambda: look_at(objects) == {"whole": (number + 1) * PROMPTS * PACKS},  # noqa: B023
                    "all packs are in the bucket",
                )  # fmt: skip
            read_all(witness, prompts)
            assert len(packs_of(objects)) == KILLS * PROMPTS * PACKS
    with capsys.disabled():
        print(f"\nkilled {KILLS} times in the middle of {cut} PUTs; {torn} were in the store")


def fill(server, prompts) -> None:
    """Put `prompts`, and return when their rows are on disk too."""
    before = server.stats().tiers["disk"].blocks
    with ChaosClient(server.endpoint, "tcp") as client:
        client.wait_until_ready()
        for one in prompts:
            assert put(client, one) == "stored"
        wanted = before + ROWS * len(prompts)
        eventually(lambda: server.stats().tiers["disk"].blocks == wanted, "rows are on disk")


def read_all(server, prompts) -> None:
    """A server that may find them in the bucket alone: each row is right or missing."""
    with ChaosClient(server.endpoint, "tcp") as client:
        client.wait_until_ready()
        for one in prompts:
            states(client, one)
            assert client.finish(client.get(MEDIUM, one)) in ("hit", "part hit", "miss")


def offer_again(server, prompts, num_packs: int) -> None:
    """Look for `prompts` as an engine does, until the disk has shown them."""
    with ChaosClient(server.endpoint, "tcp") as client:
        client.wait_until_ready()
        for one in prompts:
            eventually(
                lambda: states(client, one) == ALL_THERE,  # noqa: B023
                f"its rows are on disk: {chain_of(one)}",
            )  # fmt: skip
        eventually(
            lambda: server.stats().counters["bucket_names"] == num_packs, "it has written them"
        )
