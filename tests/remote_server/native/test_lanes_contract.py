"""The contract of lanes over real connections, held by the native ones and the reference."""

import gc
import time
import weakref
from contextlib import suppress

import pytest
from lane_helpers import FRAME_BYTES, Blocks, connected, digest, random_blocks, reap, reaped
from lane_peer import frame, read
from mover_helpers import is_readable, until

from remote_server.native import LaneJob, LaneKind

pytestmark = pytest.mark.real_time

pytest_plugins = ["engine_of_lanes_fixtures"]

KiB, MiB = 1 << 10, 1 << 20
PIECE = 256 * KiB
LENGTHS = [
    1, 0, 15, 16, 17, 128, 240, 241, 4095, 4096, 4097, 64 * KiB, PIECE - 24, PIECE, PIECE + 1,
    573_440, 2 * MiB,
]  # fmt: skip
SEEDS = [*range(1 << 63, (1 << 63) + len(LENGTHS))]


def test_blocks_of_all_lengths_arrive_with_the_digests_of_xxhash(lanes, loop):
    source, target = random_blocks(LENGTHS), Blocks(LENGTHS)
    send, receive = source.send(seeds=SEEDS), target.receive(seeds=SEEDS)
    lanes.submit(loop[0], send)
    lanes.submit(loop[1], receive)
    reaped(lanes, 2)
    assert target.memory.map[:] == source.memory.map[:]
    digests = [*map(digest, source, SEEDS)]
    assert [*send.digests] == [*receive.digests] == [*receive.announced] == digests
    assert [*send.done] == [*receive.done] == LENGTHS
    assert receive.intact() == [True] * len(LENGTHS)
    assert (send.lane, receive.lane) == loop


def test_what_is_sent_is_the_framing_of_the_protocol(lanes, link):
    lane, far = link
    blocks = random_blocks([5, 300_000, 0])
    lanes.submit(lane, blocks.send(9, seeds=[1, 2, 3]))
    expected = blocks.frames(9, [1, 2, 3])
    assert read(far, len(expected)) == expected
    lanes.submit(lane, blocks.send(1 << 63, announced=[4, 5, (1 << 64) - 1]))
    expected = b"".join(map(frame, [1 << 63] * 3, range(3), blocks, [4, 5, (1 << 64) - 1]))
    assert read(far, len(expected)) == expected
    lanes.submit(lane, blocks.send(10))
    assert read(far, len(expected)) == blocks.frames(10)
    first, *_ = reaped(lanes, 3)
    assert [*first.digests] == [*map(digest, blocks, (1, 2, 3))]


def test_a_wrong_checksum_is_the_callers_to_compare(lanes, link):
    lane, far = link
    target = Blocks([4, 4])
    receive = target.receive(seeds=[1, 1])
    lanes.submit(lane, receive)
    far.sendall(frame(7, 0, b"good", digest(b"good", 1)) + frame(7, 1, b"evil", 8))
    assert reaped(lanes, 1) == [receive]
    assert (receive.failed, receive.intact()) == (False, [True, False])
    assert [*receive.announced] == [digest(b"good", 1), 8]
    assert [*receive.digests] == [digest(b"good", 1), digest(b"evil", 1)]


def test_a_block_without_an_address_is_discarded(lanes, link):
    lane, far = link
    source, target = random_blocks([70_000, 600_000, 50]), Blocks([70_000, 600_000, 50])
    addresses = [target.memory.address, 0, target.memory.address + 670_000]
    receive = LaneJob(LaneKind.RECEIVE, 7, addresses, [70_000, 600_000, 50], seeds=[0] * 3)
    lanes.submit(lane, receive)
    far.sendall(source.frames(7, [0] * 3))
    assert reaped(lanes, 1) == [receive]
    assert [target[0], target[2]] == [source[0], source[2]]
    assert target[1] == bytes(600_000)
    assert [*receive.done] == [70_000, 600_000, 50]
    assert [*receive.digests] == [digest(source[0], 0), 0, digest(source[2], 0)]


def test_both_directions_at_once_on_many_lanes(lanes):
    pairs = [[lanes.open(end) for end in connected()] for _ in range(6)]
    ends = [*pairs, *(pair[::-1] for pair in pairs)]
    sources = [random_blocks([300_000, 20, 1_500_000]) for _ in ends]
    targets = [Blocks(source.lengths) for source in sources]
    for (near, far), source, target in zip(ends, sources, targets, strict=True):
        lanes.submit(far, target.receive(seeds=[near] * 3))
        lanes.submit(near, source.send(seeds=[near] * 3))
    assert all(all(job.intact()) for job in reaped(lanes, 2 * len(ends)))
    for source, target in zip(sources, targets, strict=True):
        assert source.memory.map[:] == target.memory.map[:]


def test_jobs_without_blocks_complete_in_their_order(lanes, link):
    lane, far = link
    empty, another = Blocks([]).receive(), Blocks([]).receive()
    lanes.submit(lane, empty)
    assert reaped(lanes, 1) == [empty]
    one = Blocks([1]).receive(1)
    lanes.submit(lane, one)
    lanes.submit(lane, another)
    far.sendall(frame(1, 0, b"x"))
    assert reaped(lanes, 2) == [one, another]
    nothing = Blocks([]).send()
    lanes.submit(lane, nothing)
    assert reaped(lanes, 1) == [nothing]


def test_the_descriptor_is_readable_exactly_while_something_can_be_reaped(lanes, link):
    lane, far = link
    assert not is_readable(lanes)
    assert lanes.reap() == ([], [])
    for _ in range(2):
        lanes.submit(lane, Blocks([9]).send())
    reaped(lanes, 2)
    assert not is_readable(lanes)
    read(far, 2 * (9 + FRAME_BYTES))
    far.close()
    assert reap(lanes, 0, 1) == ([], [(lane, 0)])
    assert not is_readable(lanes)


def test_bytes_of_no_job_wait_and_hold_back_the_peer(lanes, link):
    lane, far = link
    blocks = random_blocks([3 * MiB] * 8)
    frames = memoryview(blocks.frames())
    far.setblocking(False)
    sent = 0
    with suppress(BlockingIOError):
        while sent < len(frames):
            sent += far.send(frames[sent:])
            time.sleep(0.02)  # the kernel moves what its buffers take
    assert sent < len(frames)
    assert not is_readable(lanes)
    target = Blocks(blocks.lengths)
    lanes.submit(lane, target.receive())
    far.settimeout(60)
    far.sendall(frames[sent:])
    reaped(lanes, 1)
    assert target.memory.map[:] == blocks.memory.map[:]


def test_the_lanes_keep_a_job_and_what_it_names_until_it_is_reaped(lanes, link):
    lane, far = link
    target = Blocks([4])
    gone = weakref.ref(target)
    lanes.submit(lane, target.receive())
    del target
    gc.collect()
    assert gone() is not None
    far.sendall(frame(7, 0, b"here"))
    (job,) = reaped(lanes, 1)
    assert isinstance(job.keep, Blocks)
    assert job.keep[0] == b"here"
    del job
    until(lambda: gone() is None)


def test_a_job_is_submitted_once_at_a_time_and_again_afterwards(lanes, link):
    lane, far = link
    target = Blocks([4])
    job = target.receive()
    for block in (b"once", b"more"):
        lanes.submit(lane, job)
        with pytest.raises(ValueError, match="submitted already"):
            lanes.submit(lane, job)
        far.sendall(frame(7, 0, block))
        assert reaped(lanes, 1) == [job]
        assert target[0] == block


@pytest.mark.parametrize(
    ("columns", "how"),
    [
        (([1], []), {}),
        (([1], [1]), {"seeds": []}),
        (([1], [1]), {"announced": [1, 2]}),
        (([1], [1 << 32]), {}),
    ],
)
def test_columns_that_no_message_has_are_refused(columns, how):
    with pytest.raises(ValueError, match=r"columns|a block of"):
        LaneJob(LaneKind.SEND, 1, *columns, **how)
