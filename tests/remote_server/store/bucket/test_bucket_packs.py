"""Which rows form a pack, and the names and headers of packs."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_peer import key

from remote_server.protocol import UNKNOWN, Stretch, select
from remote_server.store.bucket.index.names import MERGE_AT, Names
from remote_server.store.bucket.packs import layout
from remote_server.store.bucket.packs.grouping import MAX_PACK_TOKENS, packs_in, rows_per_pack
from remote_server.store.bucket.packs.object_names import (
    Named,
    escaped,
    object_name,
    parse_name,
    unescaped,
)
from remote_server.store.pages import PAGE

MiB = 1 << 20


@pytest.mark.parametrize(
    ("tokens", "row_bytes", "rows"),
    [
        (16, 32_768, 64),  # as many tokens as a pack may have
        (16, MiB, 16),  # as many bytes
        (128, 2 * MiB, 8),
        (1024, MiB, 1),
        (2048, MiB, 1),  # a row that is longer than a pack
        (48, 65_536, 1),  # no power of two of these divides a run
        (16, 100 * MiB, 1),
    ],
)
def test_a_pack_has_the_most_rows_that_divide_a_run(tokens, row_bytes, rows):
    assert rows_per_pack(tokens, row_bytes, 16 * MiB) == rows


def groups_of(keys, chain, row_bytes=2 * MiB, **options):
    return [g.keys for g in packs_in(keys, chain, row_bytes, 16 * MiB, **options)]


def test_a_message_shows_its_whole_packs_and_not_its_head_or_tail():
    keys = [key(n) for n in range(20)]
    chain = [Stretch(20, 0, 3 * 128, 128)]  # rows 3 to 22 of a prompt, eight in a pack
    assert groups_of(keys, chain) == [keys[5:13]]


def test_a_message_from_the_last_row_to_the_first_shows_the_same_packs():
    keys = [key(n) for n in range(20)]
    forward = groups_of(keys, [Stretch(20, 0, 0, 128)])
    backward = groups_of(keys[::-1], [Stretch(20, 0, 19 * 128, 128, -1, True)])
    assert backward == forward[::-1] == [keys[8:16], keys[:8]]


def test_rows_without_a_place_are_packs_of_their_own_and_tails_are_when_asked_for():
    keys = [key(n) for n in range(10)]
    assert groups_of(keys, []) == [[each] for each in keys]
    assert groups_of(keys, [UNKNOWN] * 10) == [[each] for each in keys]
    chain = [Stretch(10, 0, 0, 128)]
    assert groups_of(keys, chain) == [keys[:8]]
    assert groups_of(keys, chain, with_tails=True) == [keys[:8], [keys[8]], [keys[9]]]


def test_groups_of_a_model_have_packs_of_their_own():
    keys = [key(n) for n in range(16)]
    chain = [Stretch(8, 0, 0, 128), Stretch(8, 1, 0, 128)]
    assert groups_of(keys, chain) == [keys[:8], keys[8:]]


def test_a_pack_of_a_group_with_a_window_has_the_rows_that_a_hit_up_to_its_end_loads():
    keys = [key(n) for n in range(20)]
    last_rows = [keys[5:8], keys[13:16]]
    assert groups_of(keys, [Stretch(20, 1, 0, 128, window=3)]) == last_rows
    back = Stretch(20, 1, 19 * 128, 128, -1, True, window=3)
    assert groups_of(keys[::-1], [back]) == last_rows[::-1], "as vLLM looks them up"
    assert groups_of(keys[5:8], [Stretch(3, 1, 5 * 128, 128, window=3)]) == last_rows[:1]
    assert (
        groups_of(keys[5:8], [Stretch(1, 1, n * 128, 128, window=3) for n in (5, 6, 7)])
        == (last_rows[:1])
    ), "from rows as they are stored"
    assert groups_of(keys[6:8], [Stretch(2, 1, 6 * 128, 128, window=3)]) == []
    long_window = [Stretch(20, 1, 0, 128, window=11)]
    assert groups_of(keys, long_window) == groups_of(keys, [Stretch(20, 1, 0, 128)])


def test_rows_of_a_recurrent_group_are_packs_of_their_own():
    keys = [key(n) for n in range(10)]
    assert groups_of(keys, [Stretch(10, 1, 0, 128, window=1)]) == [[each] for each in keys]


stretches = st.builds(
    lambda rows, start, tokens, back, window: Stretch(
        rows, 0, (start + (rows - 1) * back) * tokens, tokens, -1, bool(back), window
    ),
    st.integers(1, 40), st.integers(0, 40), st.sampled_from([16, 48, 128, 256, 1024]),
    st.integers(0, 1), st.sampled_from([0, 0, 1, 2, 5, 70]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(chain=st.lists(stretches, max_size=4), singles=st.booleans())
def test_packs_are_aligned_whole_and_the_same_however_the_stretches_are_cut(chain, singles):
    rows = sum(one.rows for one in chain)
    keys = [key(n) for n in range(rows)]
    found = [*packs_in(keys, chain, MiB, 16 * MiB)]
    fields = [select(chain, [n])[0] for n in range(rows)]
    for group in found:
        places = [fields[place] for place in group.places]
        first, last = places[0], places[-1]
        size = rows_per_pack(first.tokens, MiB, 16 * MiB) if first.window != 1 else 1
        assert len(places) == ((first.window and min(first.window, size)) or size)
        assert last.end % (size * first.tokens) == 0
        assert [one.start for one in places] == [
            first.start + n * first.tokens for n in range(len(places))
        ], "in the order of their tokens"
        if size > 1:
            assert first.start // MAX_PACK_TOKENS == (last.end - 1) // MAX_PACK_TOKENS
    if singles and not any(one.backwards for one in chain):
        assert {tuple(g.keys) for g in packs_in(keys, fields, MiB, 16 * MiB)} >= {
            tuple(g.keys) for g in found
        }


texts = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=40, deadline=None)
@given(tenant=texts, namespace=texts.filter(bool), raw=st.binary(min_size=1, max_size=128))
def test_a_name_says_what_it_is_and_nothing_else_is_taken_for_one(tenant, namespace, raw):
    name = object_name(tenant, namespace, raw)
    assert parse_name(name) == Named(tenant, namespace, raw)
    assert name.count("/") == 4 and ".." not in name.split("/")
    assert parse_name(name + "0") is None
    assert parse_name("v2" + name[2:]) is None


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "=", "=41", "%41", "é", "\x00"])
def test_a_part_of_a_name_has_no_character_that_a_store_changes(text):
    assert unescaped(escaped(text)) == text
    assert set(escaped(text)) <= {*"=ABCDEF0123456789ab"}


HEADER = layout.PackHeader(
    "ns", 4096, [layout.RowHeader(key(n), 4096, n, n << 32, 1) for n in range(64)]
)


def test_a_header_comes_back_and_rows_begin_on_pages():
    encoded = layout.encode_header(HEADER)
    assert len(encoded) % PAGE == 0
    assert layout.decode_header(encoded, "ns", key(63)) == HEADER
    assert all(offset % PAGE == 0 for offset in layout.offsets_of(HEADER, len(encoded)))


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, len(layout.encode_header(HEADER)) - 1), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_header_is_believed(place, bit):
    data = bytearray(layout.encode_header(HEADER))
    data[place] ^= 1 << bit
    with suppress(layout.PackDamaged, layout.PackForeign):
        assert layout.decode_header(data, "ns", key(63)) == HEADER, "padding, or unused"


@settings(max_examples=40, deadline=None)
@given(data=st.binary(max_size=9000))
def test_no_bytes_at_all_raise_anything_else(data):
    refused = (layout.PackDamaged, layout.PackForeign)
    with pytest.raises(layout.PackDamaged):
        layout.decode_header(data, "ns", key(63))
    with pytest.raises(refused):
        layout.decode_header(layout.MAGIC + data, "ns", key(63))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("adm"), st.integers(0, 60)), max_size=300))
def test_names_are_a_set(steps):
    names, model = Names(), set()
    for what, number in steps:
        if what == "a":
            names.add(number)
            model.add(number)
        elif what == "d":
            names.discard(number)
            model.discard(number)
        else:
            names.add_all(sorted({number, number + 1}))
            model |= {number, number + 1}
        assert len(names) == len(model)
    assert {n for n in range(70) if n in names} == model


def test_many_names_take_eight_bytes_each():
    names = Names()
    names.add_all(range(0, 400_000, 2))
    for number in range(1, 2 * MERGE_AT, 2):
        names.add(number)
    for number in range(0, 2 * MERGE_AT, 2):
        names.discard(number)
    assert len(names) == 200_000
    assert 1 in names and 0 not in names and 399_998 in names
    assert names._sorted.itemsize * len(names._sorted) == 1_600_000
