"""Hybrid models in the bucket: found again where a hit can end, and else not written."""

import pytest
from bucket_helpers import ROW_BYTES, ROW_TOKENS, bucket_server, chain_of, folder_url, hello
from test_bucket import PACKED, ROWS, read
from wire_peer import Peer, block, key

from remote_server.protocol import Found, StatsReply, Stretch
from remote_server.store.bucket.down.windows import can_end, shows_every_end
from remote_server.store.bucket.packs.grouping import packs_in

pytestmark = pytest.mark.real_time

WINDOW = 3
"""Rows that a hit loads of a group with a sliding window."""

STATE = 1
"""The same of a recurrent group."""


def look_up(peer: Peer, window: int) -> Found:
    """As vLLM does: the rows of full attention from the first one on, then those of the window from
    the last one back."""
    back = Stretch(ROWS, 1, (ROWS - 1) * ROW_TOKENS, ROW_TOKENS, -1, True, window)
    return peer.lookup(
        [*range(ROWS), *range(100 + ROWS - 1, 99, -1)], chain=[*chain_of(ROWS), back]
    )


def fill(peer: Peer, window: int, kept: list[int]) -> None:
    """A prompt is computed, the engine keeps these rows of its second group, and it comes again."""
    look_up(peer, window)
    chain = [Stretch(1, 1, n * ROW_TOKENS, ROW_TOKENS, window=window) for n in kept]
    numbers = [*range(ROWS), *(100 + n for n in kept)]
    peer.put(numbers, length=ROW_BYTES, chain=[*chain_of(ROWS), *chain])
    look_up(peer, window)


def written(peer: Peer, packs: int) -> StatsReply:
    return peer.stats_once(
        lambda s: s.counters["bucket_packs_written"] == packs and not s.tiers["bucket"].pending
    )


@pytest.fixture
def url(tmp_path):
    return folder_url(tmp_path)


@pytest.mark.parametrize(
    ("window", "kept", "found", "packs"),
    [
        (WINDOW, [5, 6, 7, 13, 14, 15, 17, 18, 19], [5, 6, 7, 13, 14, 15], 4),
        (WINDOW, [5, 6, 7, 14, 15], [5, 6, 7], 3),
        (WINDOW, [*range(ROWS)], [5, 6, 7, 13, 14, 15], 4),
        (STATE, [3, 11, 19], [3, 11, 19], 5),
    ],
)
def test_a_prompt_is_found_where_a_hit_can_end(url, context, window, kept, found, packs):
    """Of a window, the rows in front of a pack's end; each recurrent state."""
    with bucket_server(url) as first:
        fill(peer := hello(Peer(context, first.endpoint)), window, kept)
        written(peer, packs)
    with bucket_server(url) as second:
        peer = hello(Peer(context, second.endpoint))
        peer.stats_once(lambda s: s.counters["bucket_names"] == packs)
        look_up(peer, window)
        peer.stats_once(lambda s: s.counters["bucket_headers_read"] == packs)
        states = look_up(peer, window).states
        assert [n for n in range(ROWS) if states[n]] == [*range(PACKED)]
        assert [n for n, state in enumerate(states[: ROWS - 1 : -1]) if state] == found
        rows = range(100 + found[-1], 100 + found[-1] + 1)
        assert read(peer, rows) == [block(rows[0], ROW_BYTES)]


@pytest.mark.parametrize("window", [WINDOW, STATE])
def test_rows_that_do_not_divide_a_run_are_objects_of_their_own_wherever_a_window_is(window):
    """As those of most recurrent models: a hit can end at any row, so also at a prompt's end."""
    keys = [key(n) for n in range(2 * ROWS)]
    back = Stretch(ROWS, 1, (ROWS - 1) * 48, 48, -1, True, window)
    groups = [*packs_in(keys, [Stretch(ROWS, 0, 0, 48), back], ROW_BYTES, 16 << 20)]
    kept = {2 * ROWS - 1 - n for n in range(6, 9)}  # rows 6 to 8, in the order of the lookup
    states = bytes(2 if place < ROWS or place in kept else 0 for place in range(2 * ROWS))
    assert can_end(groups, states) and shows_every_end(groups)
    assert {len(group.keys) for group in groups} == {1}


def test_what_an_engine_keeps_is_known_of_its_namespace_where_a_lookup_shows_a_part(url, context):
    """The engine's own pool may answer for the windows, and the server is asked for the rest."""
    with bucket_server(url) as server:
        fill(peer := hello(Peer(context, server.endpoint)), WINDOW, [5, 6, 7])
        written(peer, 3)
        full = [200 + n for n in range(8)]
        peer.put(full, length=ROW_BYTES, chain=chain_of(8))
        peer.lookup(full, chain=chain_of(8))
        written(peer, 4)


@pytest.mark.parametrize("window", [WINDOW, STATE])
def test_a_prompt_that_no_hit_could_load_is_not_written_and_the_log_names_the_setting(
    url, context, caplog, window
):
    """By default vLLM keeps the window at the end of a prompt alone."""
    with bucket_server(url) as server:
        fill(peer := hello(Peer(context, server.endpoint)), window, [17, 18, 19])
        look_up(peer, window)
        stats = peer.stats()
        assert stats.counters["bucket_packs_written"] == stats.counters["bucket_demoted"] == 0
        assert stats.counters["bucket_declined_no_window"] >= 2 * PACKED
        peer.lookup(range(ROWS), chain=chain_of(ROWS))
        assert peer.stats().counters["bucket_demoted"] == 0, "nor by a lookup of one group alone"
    said = [line for line in caplog.messages if "--prefix-cache-retention-interval 1024" in line]
    assert len(said) == 1
