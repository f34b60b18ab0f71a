"""A router asks where a prompt's blocks are: over the protocol, over HTTP, of several servers."""

import json
from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from time import monotonic
from typing import Any

import aiohttp
import pytest
from admin_http import Http, served
from fake_server import eventually
from memory_server import memory_server
from tenancy import Tenancy, tenancy
from wire_peer import BLOCK_BYTES, Peer

from remote_server.admin.admin import Admin
from remote_server.client import ClientConfig, RemoteClient
from remote_server.errors import LocalProtocolError
from remote_server.fleet.locator import Locator
from remote_server.located import joined, prefix_of
from remote_server.prompt_keys import GroupKeys, Recipe
from remote_server.protocol import MAX_KEYS_PER_MESSAGE, Locate
from remote_server.server.server import Server

pytestmark = pytest.mark.real_time

assert tenancy

FACTS = {"hash_algo": "sha256", "hash_seed": "0", "key_tokens": "16 0:16"}
RECIPE = Recipe("sha256", "0", 16, ((0, 16),))
TOKENS = Random(3).choices(range(50_000), k=16 * 40 + 5)
HASHES = RECIPE.hashes(TOKENS)
KEYS = RECIPE.keys(HASHES)[0].keys


class Writer:
    """A client that puts blocks of the prompt."""

    def __init__(self, endpoint: str, **config: Any) -> None:
        self.client = RemoteClient(ClientConfig(endpoint=endpoint, **config))

    def put(self, keys: Sequence[bytes], namespace: str = "model") -> None:
        self.client.declare(namespace, BLOCK_BYTES, FACTS)
        eventually(lambda: self.client.ready)
        rows = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        done = self.client.put(namespace, keys, rows, deferred=False, timeout_s=60).result(60)
        assert done.created == len(keys), done

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def writer(server: Server) -> Iterator[Writer]:
    writer = Writer(server.endpoint)
    yield writer
    writer.close()


def test_a_prefix_ends_at_the_first_block_that_some_group_lacks():
    whole, half = GroupKeys(16, [b"k"] * 8), GroupKeys(32, [b"k"] * 4)
    assert prefix_of([(whole, bytes([1, 1, 2, 3, 1, 0, 1, 1]))]) == (
        80, {"memory": 48, "disk": 16, "bucket": 16},
    )  # fmt: skip
    found = prefix_of([(whole, bytes([1] * 8)), (half, bytes([2, 0, 2, 2]))])
    assert found == (32, {"memory": 32})
    assert prefix_of([(whole, bytes(8))]) == (0, {})


def test_the_best_place_of_several_servers_wins():
    one = (["memory", "bucket"], bytes([1, 2, 0, 0, 2]))
    two = (["memory", "disk", "unheard of"], bytes([0, 2, 2, 3, 0]))
    assert joined(5, [one, two]) == bytes([1, 2, 2, 0, 3])
    assert joined(2, []) == bytes(2)


def test_the_protocol_answers_for_every_namespace_that_has_a_block(writer: Writer, peer: Peer):
    writer.put(KEYS[:3], "one")
    writer.put(KEYS[1:2], "two")
    reply = peer.ask(Locate(request_id=5, keys=KEYS[:4]))
    assert reply.tiers == ["memory"]
    assert reply.namespaces == {"one": bytes([1, 1, 1, 0]), "two": bytes([0, 1, 0, 0])}
    one = peer.ask(Locate(request_id=6, keys=KEYS[:4], namespace="two"))
    assert one.namespaces == {"two": bytes([0, 1, 0, 0])}
    assert not peer.ask(Locate(request_id=7, keys=KEYS[:1], namespace="three")).namespaces


def test_where_blocks_are_is_no_use_of_them(writer: Writer, peer: Peer, server: Server):
    writer.put(KEYS)
    before = server.store.memory.readable_keys("model")
    peer.ask(Locate(request_id=5, keys=KEYS))
    assert server.store.memory.readable_keys("model") == before, "the order of eviction"
    assert not server.store.counters["lookup_keys"]


def test_a_client_locates_more_keys_than_a_message_has(writer: Writer):
    writer.put(KEYS)
    many = [b"%032d" % number for number in range(MAX_KEYS_PER_MESSAGE)]
    found = writer.client.locate([*KEYS[:2], *many, KEYS[2]], timeout_s=60).result(60)
    assert found.namespaces == {"model": bytes([1, 1, *bytes(len(many)), 1])}
    nothing = writer.client.locate([], timeout_s=60).result(60)
    assert not nothing.namespaces


def test_a_locator_makes_the_keys_from_tokens_or_hashes(writer: Writer, server: Server):
    writer.put(KEYS[:-3])
    with Locator(server.endpoint) as locator:
        for prompt in ({"tokens": TOKENS}, {"hashes": HASHES}):
            found = locator.locate(**prompt, timeout_s=60)
            assert found.namespaces == {"model": (37 * 16, {"memory": 37 * 16})}
            assert not found.failed
        assert not locator.locate(tokens=TOKENS, namespace="another", timeout_s=60).namespaces
        assert not locator.locate(tokens=TOKENS[1:], timeout_s=60).namespaces
        assert not locator.locate(tokens=TOKENS[:15], timeout_s=60).namespaces
        with pytest.raises(LocalProtocolError, match="tokens or hashes"):
            locator.locate()


def test_several_servers_answer_as_one():
    """What one of them lacks another has; a server that is away costs only its blocks."""
    with memory_server(name="s0") as one, memory_server(name="s1") as other:
        for endpoint, keys in ((one.endpoint, KEYS[:10] + KEYS[20:]), (other.endpoint, KEYS[5:20])):
            writer = Writer(endpoint)
            try:
                writer.put(keys)
            finally:
                writer.close()
        ends = one.endpoint, other.endpoint, "tcp://127.0.0.1:1"
        with Locator([f"{end}?name=s{number}" for number, end in enumerate(ends)]) as locator:
            found = locator.locate(tokens=TOKENS, timeout_s=60)
    assert found.namespaces == {"model": (640, {"memory": 640})}
    assert [*found.failed] == ["s2"]


def test_a_tenant_sees_its_own_blocks(tenancy: Tenancy):
    tenancy.write(a="memory = 4194304", b="memory = 4194304")
    server = tenancy.start()
    for name, keys in (("a", KEYS[:4]), ("b", KEYS[:9])):
        writer = Writer(server.endpoint, keys=tenancy.client_file(name))
        try:
            writer.put(keys)
            found = writer.client.locate(KEYS, timeout_s=60).result(60)
            assert found.namespaces["model"].count(1) == len(keys)
        finally:
            writer.close()
    keys_of_b = tenancy.client_file("b")
    with Locator(f"{server.endpoint}?keys={keys_of_b}") as locator:
        assert locator.locate(tokens=TOKENS, timeout_s=60).namespaces["model"].tokens == 9 * 16


async def test_http_answers_with_the_prefix_and_its_tiers(pair: tuple[Server, Admin], http: Http):
    writer = Writer(pair[0].endpoint)
    try:
        writer.put(KEYS[:30], "located")
        for prompt in ({"tokens": TOKENS}, {"hashes": [one.hex() for one in HASHES]}):
            status, _, text = await http.post("/locate", json=prompt)
            assert status == 200
            there = json.loads(text)["namespaces"]
            assert there == {"located": {"tokens": 480, "tiers": {"memory": 480}}}
        await http.post("/clear", json={"namespace": "located"})
        _, _, text = await http.post("/locate", token=None, json={"tokens": TOKENS})
        assert json.loads(text)["namespaces"] == {}, "asking needs no token on this machine"
    finally:
        writer.close()


async def test_http_finds_no_block_that_is_too_old():
    with served(ttl_s=100.0) as (server, admin):
        writer = Writer(server.endpoint)
        try:
            writer.put(KEYS[:3])
            server.store.tier_stack._sweep_at = inf  # nothing else removes it first
            server.store.tier_stack.clock = lambda: monotonic() + 101
            async with aiohttp.ClientSession() as session:
                ask = Http(session, admin.url).post("/locate", json={"tokens": TOKENS})
                _, _, text = await ask
            assert json.loads(text)["namespaces"] == {}
        finally:
            writer.close()


@pytest.mark.parametrize(
    "wrong",
    [
        "", "{}", "[]", '{"tokens": [1], "hashes": []}', '{"tokens": [-1]}', '{"tokens": ["a"]}',
        '{"hashes": ["xyz"]}', '{"hashes": [""]}', '{"tokens": [1], "model": "m"}',
        '{"tokens": [1e99]}', '{"hashes": ["' + "00" * 300 + '"]}',
    ],
)  # fmt: skip
async def test_http_refuses_what_is_no_prompt(http: Http, wrong: str):
    status, _, text = await http.post("/locate", data=wrong)
    assert status == 400 and text.startswith('send {"tokens"')
