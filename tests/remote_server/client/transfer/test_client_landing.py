"""Blocks that are not what they should be: noticed, counted, and never outside their row."""

import pytest
from client_helpers import (
    BLOCK_BYTES,
    NAMESPACE,
    assert_untouched,
    block,
    empty_rows,
    hold_blocks,
    turn,
)  # fmt: skip
from fake_server import PATIENCE_S, eventually
from msgspec.structs import replace

from remote_server import protocol
from remote_server.client import GetOutcome
from remote_server.protocol import Blocks, Found, Get, Got, Touched, Verified, Verify

pytestmark = pytest.mark.real_time

pytest_plugins = ["client_fixtures"]

HIT, MISS, CORRUPT, LATE = (
    GetOutcome.HIT, GetOutcome.MISS, GetOutcome.CORRUPT, GetOutcome.LATE,
)  # fmt: skip


def get_three(client, fake, tell, until=lambda: None):
    """A get of three blocks, answered with the summary and whatever `tell` makes of the blocks.
    Its result, after `until`.

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
    future = client.get(NAMESPACE, keys, rows)
    until()
    got = future.result(PATIENCE_S)
    for index in got.landed:
        assert rows[index] == block(index), "announced and wrong"
    return got, rows, keys


def flip(frame: bytes) -> bytes:
    return bytes([frame[0] ^ 1]) + frame[1:]


def packed(header: Blocks, frames: list[bytes], **fields: list[int]) -> list:
    """All blocks in one frame."""
    return [replace(header, blocks_per_frame=3, **fields), b"".join(frames)]


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
    "a short frame": (
        lambda header, f: [[header, f[0], f[1][:-1], f[2]]],
        [HIT, CORRUPT, HIT], "short_blocks",
    ),
    "a long frame": (
        lambda header, f: [[header, f[0], f[1] + b"more", f[2]]],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "a length that is not the row's": (
        lambda header, f: [[replace(header, lengths=[BLOCK_BYTES, 5, BLOCK_BYTES]), *f]],
        [HIT, CORRUPT, HIT], "wrong_lengths",
    ),
    "frames missing": (
        lambda header, f: [[header, f[0]]],
        [HIT, CORRUPT, CORRUPT], "short_blocks",
    ),
    "a bit flipped amid a packed frame": (
        lambda header, f: [packed(header, [f[0], flip(f[1]), f[2]])],
        [HIT, CORRUPT, HIT], "checksum_failures",
    ),
    "a short packed frame": (
        lambda header, f: [packed(header, [f[0], f[1], f[2][:-1]])],
        [CORRUPT] * 3, "short_blocks",
    ),
    "an empty packed frame": (
        lambda header, f: [packed(header, [])], [CORRUPT] * 3, "short_blocks",
    ),
    "a packed frame cut elsewhere": (
        lambda header, f: [packed(header, f, lengths=[BLOCK_BYTES, 2 * BLOCK_BYTES, 0])],
        [HIT, CORRUPT, CORRUPT], "wrong_lengths",
    ),
    "astronomical lengths in a packed frame": (
        lambda header, f: [packed(header, f, lengths=[2**62] * 3)], [CORRUPT] * 3, "short_blocks",
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
    "an index outside in a packed frame": (
        lambda header, f: [packed(header, f, indices=[0, 9, 2])], [HIT, MISS, HIT],
        "misplaced_blocks",
    ),
    "an index twice in a packed frame": (
        lambda header, f: [packed(header, f, indices=[0, 0, 2])], [HIT, MISS, HIT],
        "misplaced_blocks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", HEADERS)
def test_a_header_may_say_what_it_likes(timed, fake, clock, lie):
    tell, outcomes, counter = HEADERS[lie]

    def until_noticed():
        eventually(lambda: timed.counters()[counter])
        turn(timed)
        clock.advance(0.06 if LATE in outcomes else 0)

    got, rows, _ = get_three(timed, fake, tell, until_noticed)
    assert got.outcomes == outcomes
    landed = tuple(i for i, outcome in enumerate(outcomes) if outcome in (HIT, CORRUPT))
    assert_untouched(rows, but=landed)
    fake.behave()
    keys = hold_blocks(fake, range(3))
    assert timed.get(NAMESPACE, keys, rows).result(PATIENCE_S).outcomes == [HIT] * 3


def test_an_answer_to_a_lookup_that_does_not_fit_counts_as_none(client, fake):
    def answer(asked):
        about = {"request_id": asked.message.request_id, "epoch": fake.epoch}
        fake.send(asked, Found(prefix=9, states=b"\2" * 9, **about))
        fake.send(asked, Found(prefix=1, states=b"\x63", **about))
        fake.send(asked, Verified(removed=0, intact=0, **about))
        fake.send(asked, Found(prefix=0, states=b"\1", **about), b"payload")
        fake.send(asked, Found(prefix=1, states=b"\1", **about))

    fake.rules[protocol.Lookup] = answer
    found = client.lookup(NAMESPACE, [b"k"]).result(PATIENCE_S)
    assert found.states == b"\1"
    assert found.prefix == 0, "a prefix never outruns its states"
    assert client.counters()["protocol_errors"] == 4
