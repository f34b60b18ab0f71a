"""Blocks that are not what they should be: noticed, counted, and never outside their row."""

import random

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually
from msgspec.structs import replace

from remote_server import protocol
from remote_server.client import GetOutcome
from remote_server.protocol import (
    Blocks,
    Found,
    Get,
    Got,
    Touched,
    Verified,
    Verify,
)

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, MISS, CORRUPT, LATE = (
    GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.LATE,
)  # fmt: skip


def get_three(client, fake, tell, stall_s=5.0):
    """A get of three blocks, answered with the summary and whatever `tell` makes of the blocks.

    `tell(header, frames)` returns messages, each a list of header and frames.
    """
    keys = hold_blocks(fake, range(3))

    def answer(asked):
        fake.send(asked, fake.summary_for(asked))
        header, *frames = fake.blocks_for(asked, [0, 1, 2])
        for message in tell(header, frames):
            fake.send(asked, *message)

    fake.rules[Get] = answer
    rows = empty_rows(3)
    got = client.get(NAMESPACE, keys, rows, stall_s=stall_s).result(PATIENCE_S)
    for index in got.landed:
        assert rows[index] == block(index), "announced and wrong"
    return got, rows, keys


def flip(frame: bytes) -> bytes:
    return bytes([frame[0] ^ 1]) + frame[1:]


LIES = {
    "a bit flipped": (
        lambda header, f: [[header, f[0], flip(f[1]), f[2]]],
        [HIT, CORRUPT, HIT], "checksum_failures",
    ),
    "another block's bytes": (
        lambda header, f: [[header, f[0], f[2], f[1]]],
        [HIT, CORRUPT, CORRUPT], "checksum_failures",
    ),
    "another block's bytes and checksum": (
        lambda header, f: [
            [replace(header, checksums=[header.checksums[i] for i in (0, 2, 1)]), f[0], f[2], f[1]]
        ],
        [HIT, CORRUPT, CORRUPT], "checksum_failures",
    ),
    "a wrong checksum": (
        lambda header, f: [[replace(header, checksums=[1, *header.checksums[1:]]), *f]],
        [CORRUPT, HIT, HIT], "checksum_failures",
    ),
    "a short frame": (
        lambda header, f: [[header, f[0], f[1][:-1], f[2]]],
        [HIT, CORRUPT, HIT], "short_blocks",
    ),
    "an empty frame": (
        lambda header, f: [[header, f[0], b"", f[2]]],
        [HIT, CORRUPT, HIT], "short_blocks",
    ),
    "a long frame": (
        lambda header, f: [[header, f[0], f[1] + b"more", f[2]]],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "a very long frame": (
        lambda header, f: [[header, f[0], f[1] * 100, f[2]]],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "a length that is not the row's": (
        lambda header, f: [[replace(header, lengths=[BLOCK_BYTES, 5, BLOCK_BYTES]), *f]],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "a block shorter than its row, honestly": (
        lambda header, f: [
            [replace(header, lengths=[BLOCK_BYTES, 5, BLOCK_BYTES]), f[0], f[1][:5], f[2]]
        ],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "frames missing": (
        lambda header, f: [[header, f[0]]],
        [HIT, CORRUPT, CORRUPT], "short_blocks",
    ),
    "no frames at all": (
        lambda header, f: [[header]],
        [CORRUPT, CORRUPT, CORRUPT], "short_blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_block_that_is_not_what_was_asked_for_is_corrupt(client, fake, lie):
    tell, outcomes, counter = LIES[lie]
    got, rows, keys = get_three(client, fake, tell)
    assert got.outcomes == outcomes
    assert got.error is None
    bad = [index for index, outcome in enumerate(outcomes) if outcome is CORRUPT]
    assert client.counters()[counter] == len(bad)
    assert_untouched(rows, but=(0, 1, 2))
    (verify,) = fake.wait_for(Verify)
    assert verify.message.keys == [keys[index] for index in bad]
    eventually(lambda: client.counters()["verify_intact"] == len(bad))


HEADERS = {
    "an index outside": (
        lambda header, f: [[replace(header, indices=[0, 1, 7]), *f]], [HIT, HIT, MISS],
        "misplaced_blocks",
    ),
    "an index far outside": (
        lambda header, f: [[replace(header, indices=[0, 1, 2**62]), *f]], [HIT, HIT, MISS],
        "misplaced_blocks",
    ),
    "an index twice": (
        lambda header, f: [[replace(header, indices=[0, 0, 2]), f[0], b"x" * 9, f[2]]],
        [HIT, MISS, HIT], "misplaced_blocks",
    ),
    "a message twice": (
        lambda header, f: [[replace(header, more=True), *map(flip, f)], [header, *f]],
        [CORRUPT] * 3, "late_replies",
    ),
    "a frame too many": (
        lambda header, f: [[header, *f, b"more"]], [HIT] * 3, "protocol_errors",
    ),
    "fewer lengths than blocks": (
        lambda header, f: [[replace(header, lengths=[BLOCK_BYTES]), *f]], [LATE] * 3,
        "protocol_errors",
    ),
    "fewer checksums than blocks": (
        lambda header, f: [[replace(header, checksums=[]), *f]], [LATE] * 3, "protocol_errors",
    ),
    "no blocks to a frame": (
        lambda header, f: [[replace(header, blocks_per_frame=0), *f]], [LATE] * 3,
        "protocol_errors",
    ),
    "the last message first": (
        lambda header, f: [[replace(header, indices=[1], lengths=header.lengths[:1],
                                    checksums=header.checksums[1:2]), f[1]], [header, *f]],
        [MISS, HIT, MISS], "late_replies",
    ),
    "a reply to something else": (
        lambda header, f: [
            [Touched(request_id=header.request_id, epoch=header.epoch, touched=1)], [header, *f]
        ],
        [HIT] * 3, "protocol_errors",
    ),
    "a reply to nothing": (
        lambda header, f: [[replace(header, request_id=10**6), *f], [header, *f]], [HIT] * 3,
        "late_replies",
    ),
    "a summary of something else": (
        lambda header, f: [
            [Got(request_id=header.request_id, epoch=header.epoch, total=9, hit=1, miss=0,
                 duplicate=0, found=[8])],
            [header, *f],
        ],
        [HIT] * 3, "protocol_errors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_may_say_what_it_likes(client, fake, lie):
    tell, outcomes, counter = HEADERS[lie]
    got, rows, _ = get_three(client, fake, tell, stall_s=0.1 if LATE in outcomes else 5.0)
    assert got.outcomes == outcomes
    eventually(lambda: client.counters()[counter])
    landed = tuple(i for i, outcome in enumerate(outcomes) if outcome in (HIT, CORRUPT))
    assert_untouched(rows, but=landed)
    fake.behave()
    keys = hold_blocks(fake, range(3))
    assert client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S).outcomes == [HIT] * 3


def test_packed_blocks_are_checked_one_by_one(client, fake):
    """Three blocks in one frame: one bad apple, two good ones."""

    def tell(header, frames):
        packed = frames[0] + flip(frames[1]) + frames[2]
        return [[replace(header, blocks_per_frame=3), packed]]

    got, rows, keys = get_three(client, fake, tell)
    assert got.outcomes == [HIT, CORRUPT, HIT]
    (verify,) = fake.wait_for(Verify)
    assert verify.message.keys == [keys[1]]
    assert_untouched(rows, but=(0, 1, 2))


@pytest.mark.parametrize(
    ("indices", "lengths", "size", "outcomes"),
    [
        ([0, 1, 2], [BLOCK_BYTES] * 3, 3 * BLOCK_BYTES - 1, [CORRUPT] * 3),
        ([0, 1, 2], [BLOCK_BYTES] * 3, 0, [CORRUPT] * 3),
        ([0, 1, 2], [BLOCK_BYTES, 2 * BLOCK_BYTES, 0], None, [HIT, CORRUPT, CORRUPT]),
        ([0, 9, 2], [BLOCK_BYTES] * 3, None, [HIT, MISS, HIT]),
        ([0, 0, 2], [BLOCK_BYTES] * 3, None, [HIT, MISS, HIT]),
        ([0, 1, 2], [2**62, 2**62, 2**62], None, [CORRUPT] * 3),
    ],
    ids=["short", "empty", "cut elsewhere", "outside", "twice", "astronomical"],
)
def test_a_packed_frame_may_lie_too(client, fake, indices, lengths, size, outcomes):
    def tell(header, frames):
        lying = replace(header, blocks_per_frame=3, indices=indices, lengths=lengths)
        return [[lying, b"".join(frames)[:size]]]

    got, rows, _ = get_three(client, fake, tell)
    assert got.outcomes == outcomes
    touched = tuple(i for i, outcome in enumerate(outcomes) if outcome is not MISS)
    assert_untouched(rows, but=touched)


def test_checksums_are_not_looked_at_when_integrity_is_off(fake, make_client):
    client = make_client(fake.endpoint, integrity=False)
    keys = hold_blocks(fake, range(3))

    def answer(asked):
        fake.send(asked, fake.summary_for(asked))
        header, *frames = fake.blocks_for(asked, [0, 1, 2])
        fake.send(asked, replace(header, checksums=[0, 0, 0]), *frames)

    fake.rules[Get] = answer
    assert client.get(NAMESPACE, keys, empty_rows(3), stall_s=5).result(PATIENCE_S).landed == [
        0,
        1,
        2,
    ]


def test_an_answer_to_a_lookup_that_does_not_fit_counts_as_none(client, fake):
    def answer(asked):
        about = {"request_id": asked.message.request_id, "epoch": fake.epoch}
        fake.send(asked, Found(prefix=9, states=b"\2" * 9, **about))
        fake.send(asked, Found(prefix=1, states=b"\x63", **about))
        fake.send(asked, Verified(removed=0, intact=0, **about))
        fake.send(asked, Found(prefix=0, states=b"\1", **about), b"payload")
        fake.send(asked, Found(prefix=1, states=b"\1", **about))

    fake.rules[protocol.Lookup] = answer
    found = client.lookup(NAMESPACE, [b"k"], timeout_s=1).result(PATIENCE_S)
    assert found.states == b"\1"
    assert found.prefix == 0, "a prefix never outruns its states"
    assert client.counters()["protocol_errors"] == 4


def _garbage(rng, asked, fake):
    """One bad reply: an honest one with something broken, or noise."""
    positions = list(range(len(asked.message.keys)))
    header, *frames = fake.blocks_for(asked, positions, more=True)
    kind = rng.randrange(10)
    if kind == 0:
        return [rng.randbytes(rng.randrange(20)) for _ in range(rng.randrange(1, 5))]
    if kind == 1:
        return [protocol.MAGIC, rng.randbytes(rng.randrange(200)), *frames]
    if kind == 2:
        return [protocol.MAGIC]
    if kind == 3:
        encoded = bytearray(protocol.encode(header)[1])
        encoded[rng.randrange(len(encoded))] ^= 1 << rng.randrange(8)
        return [protocol.MAGIC, bytes(encoded), *frames]
    if kind == 4:
        rng.shuffle(frames)
        return [*protocol.encode(header), *frames]
    if kind == 5:
        header = replace(header, indices=[rng.randrange(-0, 12) for _ in positions])
    elif kind == 6:
        header = replace(header, lengths=[rng.randrange(2 * BLOCK_BYTES) for _ in positions])
    elif kind == 7:
        header = replace(header, blocks_per_frame=rng.randrange(6))
    elif kind == 8:
        frames = [*frames[: rng.randrange(len(frames))], rng.randbytes(rng.randrange(9000))]
    else:
        header = replace(header, request_id=header.request_id + rng.randrange(-3, 3))
    return [*protocol.encode(header), *(flip(f) if rng.random() < 0.5 and f else f for f in frames)]


@pytest.mark.parametrize("seed", range(4))
def test_500_bad_replies_break_nothing(client, fake, seed):
    """Whatever comes, a row is HIT with its own bytes or not HIT; its neighbours stay as they are;
    the client goes on."""
    rng = random.Random(seed)
    keys = hold_blocks(fake, range(5))

    def answer(asked):
        if rng.random() < 0.5:
            fake.send(asked, fake.summary_for(asked))
        for _ in range(25):
            fake.send_raw(asked, *_garbage(rng, asked, fake))

    fake.rules[Get] = answer
    for _ in range(20):
        rows = empty_rows(5)
        got = client.get(NAMESPACE, keys, rows, stall_s=0.02).result(PATIENCE_S)
        for index in got.landed:
            assert rows[index] == block(index)
        assert_untouched(rows, but=(0, 1, 2, 3, 4))
        eventually(lambda: client.ready)
    fake.behave()

    def all_is_well():
        return client.get(NAMESPACE, keys, empty_rows(5)).result(PATIENCE_S).landed == [*range(5)]

    eventually(all_is_well)
    assert client.counters()["protocol_errors"] > 0


def test_noise_on_the_control_connection_breaks_nothing(client, fake):
    rng = random.Random(1)

    def answer(asked):
        for _ in range(50):
            fake.send_raw(asked, *(rng.randbytes(rng.randrange(60)) for _ in range(3)))
            fake.send_raw(asked, protocol.MAGIC, rng.randbytes(rng.randrange(60)))
        fake.answer(asked)

    fake.rules[protocol.Lookup] = answer
    for _ in range(10):
        client.lookup(NAMESPACE, [b"k"], timeout_s=2).result(PATIENCE_S)
    assert client.counters()["protocol_errors"] == 1000


def test_a_frame_larger_than_the_protocol_allows_costs_the_connection_only(client, fake):
    keys = hold_blocks(fake, range(1))

    def answer(asked):
        header = Blocks(
            request_id=asked.message.request_id, epoch=fake.epoch, indices=[0],
            lengths=[protocol.MAX_FRAME_BYTES + 1], checksums=[0], more=False,
        )  # fmt: skip
        fake.send(asked, header, bytes(protocol.MAX_FRAME_BYTES + 1))

    fake.rules[Get] = answer
    rows = empty_rows(1)
    got = client.get(NAMESPACE, keys, rows, stall_s=2).result(PATIENCE_S)
    assert got.outcomes == [GetOutcome.UNAVAILABLE]
    assert_untouched(rows)
    fake.behave()
    eventually(lambda: client.ready)
    assert client.get(NAMESPACE, keys, rows, stall_s=5).result(PATIENCE_S).landed == [0]
