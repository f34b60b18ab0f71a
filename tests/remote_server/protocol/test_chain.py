"""Chain fields from the wire into memory, to the disk and back."""

import base64
import json
import random
import struct
import zlib

import pytest
from client_helpers import rows_of
from disk_helpers import RealDisk, budget_for, stack_of
from disk_server import LENGTH, small_server
from wire_peer import Peer, key

from remote_server import protocol
from remote_server.cli.__main__ import main
from remote_server.errors import RequestRefused
from remote_server.protocol import (
    MAX_STRETCHES,
    MAX_TOKENS,
    MAX_WINDOW,
    UNKNOWN,
    Stretch,
    check_chain,
    select,
)
from remote_server.protocol.codec import ChainTable, from_words, to_words
from remote_server.shm.mapping import Arena
from remote_server.store.disk.layout import SlotHeader, pack_slot_header, unpack_slot_header
from remote_server.store.memory.tier import MemoryTier
from remote_server.store.stack.fetches import Fetches
from remote_server.store.tier import Offered

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

ROWS = [
    Stretch(5, 0, 320, 32, 320), Stretch(4, 1, 640, 16, 320, True, 9), Stretch(2, 0, 480, 32, 0)
]  # fmt: skip


def blocks_of(chain):
    """The fields of each block, made one by one."""
    return [
        Stretch(
            1,
            s.group,
            s.start + n * (-s.tokens if s.backwards else s.tokens),
            s.tokens,
            s.known,
            window=s.window,
        )
        for s in chain
        for n in range(s.rows)
    ]


def test_the_chain_of_some_keys_has_the_fields_of_these_keys_alone():
    rng = random.Random(1)
    every = blocks_of(ROWS)
    choices = [sorted(rng.sample(range(11), rng.randrange(12))) for _ in range(200)]
    for indices in [*choices, range(11), range(3, 8), range(0)]:
        assert blocks_of(select(ROWS, indices)) == [every[index] for index in indices]
    assert select([], [0, 1]) == []


def test_neighbours_among_selected_keys_stay_one_stretch():
    chain = [Stretch(8192, 0, 0, 16)]
    indices = [*range(0, 64), *range(128, 256), 300, *range(4096, 8192)]
    assert select(chain, indices) == [
        Stretch(64, 0, 0, 16), Stretch(128, 0, 2048, 16), Stretch(1, 0, 4800, 16),
        Stretch(4096, 0, 65536, 16),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("chain", "word"),
    [
        ([Stretch(3, 0, 0, 16)], "3 blocks in 1 stretches, and 2 keys"),
        ([Stretch(2, 0, 7, 0)], "begins and ends at token 7"),
        ([Stretch(2, 0, 5, 16, 0, True)], "11 tokens before token 0"),
        ([Stretch(2, 0, MAX_TOKENS - 31, 16)], f"behind token {MAX_TOKENS}"),
    ],
)
def test_nonsense_is_refused_with_its_reason(chain, word):
    check_chain([Stretch(2, 0, MAX_TOKENS - 32, 16)], 2)  # ends with the last token
    with pytest.raises(RequestRefused, match=word):
        check_chain(chain, 2)


@pytest.mark.parametrize("slots", [[*range(3, 14)], [9, 3, 4, 5, 12, 1, 0, 19, 18, 17, 16]])
def test_a_table_returns_the_fields_of_each_slot_wherever_it_is(slots):
    table = ChainTable()
    assert table[0] == UNKNOWN
    table.set([0, 1], 20, [UNKNOWN, UNKNOWN])
    assert table[1] == UNKNOWN
    table.set(slots, 20, ROWS)
    assert [table[slot] for slot in slots] == blocks_of(ROWS)
    table.set(slots[:3], 20, [])
    assert [table[slot] for slot in slots[:4]] == [UNKNOWN] * 3 + blocks_of(ROWS)[3:4]


def test_the_largest_fields_survive_their_words():
    largest = Stretch(1, 65535, MAX_TOKENS - 1, 1, MAX_TOKENS, False, MAX_WINDOW)
    for block in (largest, Stretch(1, 0, 0, 1), UNKNOWN):
        assert from_words(*to_words(block)) == block
    assert from_words(5 << 32 | 5, 0) == UNKNOWN, "no block ends where it begins"


# ── tiers ────────────────────────────────────────────────────────────────────────────────────


def test_fields_go_down_to_the_disk_and_come_back_with_a_promotion_after_a_restart(tmp_path):
    keys = [b"%d" % number for number in range(11)]
    budget, segment_bytes = budget_for(2, 16, 4096)
    data = bytes(4096)
    sums = [protocol.checksum("ns", key, data) for key in keys]
    for start in range(3):
        arena = Arena(256 << 10)
        with RealDisk(tmp_path, budget, segment_bytes) as disk:
            memory = MemoryTier(arena, slab_bytes=64 << 10)
            stack = stack_of(memory, disk.tier, lambda _: 4096)
            if not start:
                blocks = memory.begin_puts(Offered("ns", keys, [4096] * 11, sums, ROWS), 4096)
                for block in blocks:
                    memory.view(block)[:] = data
                memory.complete_puts(blocks)
                stack.published(blocks)
            disk.drain()
            assert [stack.explain("ns", key)[0] for key in keys] == blocks_of(ROWS)
            memory.clear("ns")
            assert [stack.explain("ns", key)[0] for key in keys] == blocks_of(ROWS)
            promoted = []
            Fetches(stack).fetch("ns", keys, promoted.extend)
            disk.drain()
            stack.finish_jobs()
            assert [block.chain for block in promoted] == blocks_of(ROWS)
            memory.unpin_all(promoted)
            disk.drain()
        arena.close()


# A segment of three slots with two blocks of 1,000 bytes, from the server before chain fields.
OLD_SEGMENT = (
    "c-rmRze+-J6u|M{y*dR!tFteVgO5-RHwiHehc>~W=nq0`xCGJA69f){s}QsrZPC&qv?)XoI<+>XVPw6*mCt88>lqGwI"
    "Z1WBvbIrLib5QwGFOA0+-O`3$KPXk&xDzJ=k{*6eAo;C002NrJVocP7qxCVne_kW*7l_Tvw!;kr~6MH_nW=i?rAjZ|D"
    "%KYs_g*)06;o?7O(TqAN^4TEIbzv005Z(|4$>~|Np<A+`M$#jkEao|6i~*0000;hljV)<;wkDD+U&xiw6Jz0000000000"
    ">GuT#c15-"
)


def test_a_folder_of_the_server_before_is_read_with_unknown_fields_and_gets_new_blocks(tmp_path):
    (tmp_path / "segment-00000001").write_bytes(zlib.decompress(base64.b85decode(OLD_SEGMENT)))
    budget, segment_bytes = budget_for(1, 3, 1000)
    with RealDisk(tmp_path, budget, segment_bytes) as disk:
        disk.drain()
        assert disk.tier.counters()["recovered"] == 2
        for number in range(2):
            assert disk.tier.peek("ns", b"old%d" % number).chain == UNKNOWN
            assert disk.read(b"old%d" % number) == bytes([number + 1]) * 1000
        sums = [protocol.checksum("ns", b"new", bytes(1000))]
        blocks = disk.tier.begin_puts(Offered("ns", [b"new"], [1000], sums, ROWS[:1]), 1000)
        disk.tier.write(blocks, [memoryview(bytes(1000))], lambda _: None)
        disk.drain()
    with RealDisk(tmp_path, budget, segment_bytes) as disk:
        disk.drain()
        chains = [disk.tier.peek("ns", key).chain for key in (b"old0", b"old1", b"new")]
        assert chains == [UNKNOWN, UNKNOWN, blocks_of(ROWS)[0]]


def test_a_slot_header_keeps_its_fields_before_its_checksum_and_nothing_else_moves():
    fields = Stretch(1, 2, 640, 32, 96)
    without = pack_slot_header(SlotHeader(b"key", 100, 1, 5), 3, 7)
    page = pack_slot_header(SlotHeader(b"key", 100, 1, 5, fields), 3, 7)
    assert unpack_slot_header(page, 3, 7, 8192) == SlotHeader(b"key", 100, 1, 5, fields)
    assert page[:-24] == without[:-24]
    assert without[-24:-8] == bytes(16)
    assert struct.unpack("<4I", page[-24:-8]) == (672, 640, 2, 97)


# ── a server ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "chain", [[Stretch(1, 0, 0, 16)], [Stretch(3, 0, 0, 16)], [Stretch(2, 0, 0, 0)]]
)
def test_a_put_and_a_lookup_with_nonsense_are_refused_and_change_nothing(tmp_path, context, chain):
    with small_server(tmp_path) as server:
        peer = Peer(context, server.endpoint)
        peer.hello(namespace="big", block_bytes=LENGTH)
        for refused in (
            peer.put([1, 2], namespace="big", length=LENGTH, chain=chain),
            peer.lookup([1, 2], "big", chain=chain),
        ):
            assert refused.code == "bad_request"
            assert refused.message.startswith("chain: ")
        assert peer.lookup([1, 2], "big").states == b"\0\0"
        assert peer.put([1], namespace="big", length=LENGTH, chain=[[1, 0, -1, 16]]).code == (
            "bad_message"
        )
        too_many = [Stretch(1, 0, 0, 16)] * (MAX_STRETCHES + 1)
        assert peer.lookup([*range(MAX_STRETCHES + 1)], "big", chain=too_many).code == "bad_message"


def test_a_long_put_has_the_fields_of_each_key_where_the_server_takes_it_in_parts(server, context):
    peer = Peer(context, server.endpoint)
    peer.hello(block_bytes=64)
    chain = [Stretch(300, 0, 0, 16, 0), Stretch(400, 1, 64_000, 32, 0, True)]
    numbers = [*range(700)]
    assert peer.put(numbers, length=64, chain=chain).created == 700
    assert peer.lookup(numbers, explain=True).chain == blocks_of(chain)


@pytest.mark.parametrize("transport", ["tcp", "shm"], indirect=True)
def test_a_client_cuts_the_chain_with_its_batches(server, transport, make_client):
    chain = [Stretch(40, 0, 0, 16, 640), Stretch(24, 1, 0, 64, 640)]
    keys = [b"%d" % number for number in range(64)]
    client = make_client(server.endpoint, batch_bytes=10 * 4096)
    assert client.transport == transport
    stored = client.put("ns", keys, rows_of(range(64)), deferred=False, chain=chain).result(60)
    assert stored.created == 64, stored.error
    assert client.lookup("ns", keys, chain=chain).result(60).prefix == 64
    found = client.lookup("ns", [*keys, b"absent"], explain=True).result(60)
    assert (found.chain, found.prefix) == ([*blocks_of(chain), UNKNOWN], 64)
    assert client.lookup("undeclared", keys, explain=True).result(60).prefix == 0


# ── kvferry why KEY ──────────────────────────────────────────────────────────────────────────


def test_why_shows_the_tokens_the_group_and_the_request_of_a_block(server, context, capsys):
    peer = Peer(context, server.endpoint)
    peer.hello(block_bytes=64)
    peer.put([1, 2], length=64, chain=[Stretch(2, 3, 16_384, 512, 12_288)])
    peer.put([3], length=64, chain=[Stretch(1, 0, 0, 512, 0)])
    peer.put([4], length=64)

    def why(number, *flags):
        status = main(["why", key(number).hex(), *flags, "--server", server.endpoint])
        return status, capsys.readouterr().out

    status, out = why(2)
    assert status == 0
    assert "tokens 16,896 to 17,408 of group 3" in out
    assert "continued request, 12,288 tokens of which were known" in out
    assert "put by a first turn" in why(3)[1]
    assert "its client sent no place in the prompt" in why(4)[1]
    (facts,) = json.loads(why(2, "--json")[1])
    assert (facts["start"], facts["end"], facts["group"], facts["known"]) == (
        16_896, 17_408, 3, 12_288
    )  # fmt: skip
    status, out = why(5)
    assert (status, out) == (1, "no namespace has a readable block of this key\n")
