"""What a get names before it requests it: always the next blocks, each once, so many bytes."""

from remote_server.client.transfer.get import NamedAhead
from remote_server.protocol import MAX_AHEAD_KEYS

SIZE = 100


def named_by(num_blocks: int, batch: int, most_bytes: int) -> list[list[int]]:
    """What each request of a get of `num_blocks` names, which requests `batch` at a time."""
    ahead, left, named = NamedAhead(), [*range(num_blocks)], []
    while left:
        blocks = ((b"%d" % number, SIZE) for number in left)
        number = min(batch, len(left))
        now = ahead.next(number, blocks, most_bytes)
        ahead.sent(number, now)
        named.append([int(key) for key in now.keys])
        del left[:number]
    return named


def test_the_first_request_names_all_of_the_window_and_each_further_one_what_it_moved_on():
    assert named_by(12, 2, 5 * SIZE) == [
        [2, 3, 4, 5, 6], [7, 8], [9, 10], [11], [], [],
    ]  # fmt: skip


def test_a_request_larger_than_what_was_named_names_what_is_behind_it():
    assert named_by(12, 4, 3 * SIZE) == [[4, 5, 6], [8, 9, 10], []]


def test_one_request_names_a_limited_number_of_keys_and_the_next_ones_go_on():
    first, second, *_ = named_by(3 * MAX_AHEAD_KEYS, 1, 1 << 40)
    assert first == [*range(1, MAX_AHEAD_KEYS + 1)]
    assert second == [*range(MAX_AHEAD_KEYS + 1, 2 * MAX_AHEAD_KEYS + 1)]


def test_what_was_not_sent_is_named_by_the_next_request():
    ahead = NamedAhead()
    blocks = [(b"%d" % number, SIZE) for number in range(6)]
    unsent = ahead.next(2, iter(blocks), 2 * SIZE)
    assert ahead.next(2, iter(blocks), 2 * SIZE) == unsent
    assert unsent.keys == [b"2", b"3"]


def test_a_window_of_nothing_names_nothing():
    assert named_by(4, 1, 0) == [[], [], [], []]
