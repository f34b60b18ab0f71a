"""Whatever a server sends: no row is wrong, none is written beyond it or too late, and the client
goes on."""

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import pytest
from client_helpers import NAMESPACE, PATTERN
from fake_server import PATIENCE_S, WORDS, eventually
from fuzzed_client import KEYS, LARGEST, SHORT_S, FuzzedClient
from hypothesis import given
from hypothesis import strategies as st
from mutations import programs, raw_messages
from shared_messages import SharedGet, SharedPut

from remote_server.client import GetOutcome, RemoteClient
from remote_server.client.shm import attachment
from remote_server.errors import KVFerryError
from remote_server.protocol import Get, Hello, KeyState, Lookup, Put, PutOutcome, Stats, Touch

pytestmark = pytest.mark.real_time

pytest_plugins = ["fuzzing"]

lies = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 5), programs),
        st.tuples(st.integers(0, 5), programs),
        st.tuples(st.integers(0, 5), programs),
        raw_messages,
    ),
    max_size=3,
)
lengths = st.sampled_from([LARGEST, LARGEST, 1000, 513, 64, 1])
mostly = st.sampled_from([True, True, True, False])
places = st.integers(0, 1 << 16)


class Wanted(NamedTuple):
    """One key of a get: whether the server has it, how long it is, how long its row is."""

    key: bytes
    there: bool
    length: int
    row: int


def wanted(key: bytes, there: bool, length: int, row: int | None) -> Wanted:
    return Wanted(key, there, length, row or length)


wants = st.lists(
    st.builds(
        wanted, st.sampled_from(KEYS), st.sampled_from([True, True, True, False]), lengths,
        st.one_of(st.none(), st.none(), st.none(), lengths),
    ),
    min_size=1, max_size=6,
)  # fmt: skip


class World:
    """The client, kept as long as all is well with it."""

    def __init__(self) -> None:
        self._fuzzed: FuzzedClient | None = None

    def __call__(self) -> FuzzedClient:
        if self._fuzzed is None:
            self._fuzzed = FuzzedClient()
        return self._fuzzed

    def end(self) -> None:
        if self._fuzzed is not None:
            fuzzed, self._fuzzed = self._fuzzed, None
            fuzzed.close()


@pytest.fixture
def world(monkeypatch):
    # A lie about the epoch ends the attachment, and the same socket is tried again after this.
    monkeypatch.setattr(attachment, "RETRY_S", SHORT_S)
    world = World()
    yield world
    world.end()


def try_out(world: World, what: Callable[[FuzzedClient], None]) -> None:
    """After a failure the next example, which may be a smaller one, starts afresh."""
    try:
        what(world())
    except BaseException:
        world.end()
        raise


# ── gets ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
def test_a_row_is_a_hit_only_with_its_blocks_bytes_and_is_nobodys_but_its_own(fuzz, world, shared):
    @given(
        wants=wants, told=lies, late=lies, honest=mostly, per_frame=st.integers(1, 3),
        damage=st.lists(st.tuples(places, places), max_size=2),
    )  # fmt: skip
    def one(wants, told, late, honest, per_frame, damage):
        def check(fuzzed: FuzzedClient) -> None:
            fuzzed.fake.blocks_per_frame = per_frame
            blocks = fuzzed.hold({want.key: want.length for want in wants if want.there})
            sizes = [want.row for want in wants]
            rows = fuzzed.rows(sizes, shared=shared)
            exchanges = fuzzed.fake.lie(
                SharedGet if shared else Get, told, honest_in_the_end=honest,
                meddle=lambda: meddle(fuzzed, damage),
            )  # fmt: skip
            keys = [want.key for want in wants]
            got = fuzzed.client.get(NAMESPACE, keys, rows, stall_s=SHORT_S)
            result = got.result(PATIENCE_S)
            judge_get(result, keys, rows, blocks)
            fuzzed.assert_guards_stand(sizes, shared=shared)
            for row in rows:  # they are ours again, and ours alone
                row[:] = bytes([PATTERN]) * row.nbytes
            fuzzed.fake.lie_again(exchanges, late)
            fuzzed.assert_all_is_well()
            for row in rows:
                assert row.tobytes().count(PATTERN) == row.nbytes, "written after the end"
            fuzzed.assert_guards_stand(sizes, shared=shared)

        try_out(world, check)

    fuzz.run(one, examples=40)


def meddle(fuzzed: FuzzedClient, damage: list[tuple[int, int]]) -> None:
    """Bytes of the arena, and generation words, change without a message."""
    for where, what in damage:
        at = where % len(fuzzed.fake.words) if what % 2 else 0
        if what % 2:
            fuzzed.fake.words[at] ^= 1 << what % 64
        else:
            fuzzed.fake.arena[where % WORDS] ^= 1 << what % 8


def judge_get(result, keys, rows, blocks) -> None:
    assert len(result.outcomes) == len(keys)
    hits = [i for i, outcome in enumerate(result.outcomes) if outcome is GetOutcome.HIT]
    assert result.landed == hits
    assert result.bytes == sum(rows[index].nbytes for index in hits)
    for index in hits:
        assert rows[index] == blocks.get(keys[index]), "announced and wrong"


# ── puts ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shared", [False, True], ids=["tcp", "shm"])
def test_a_put_ends_whatever_is_answered_and_its_rows_are_only_read(fuzz, world, shared):
    @given(
        sizes=st.lists(lengths, min_size=1, max_size=5), told=lies, late=lies,
        honest=mostly, deferred=st.booleans(),
    )  # fmt: skip
    def one(sizes, told, late, honest, deferred):
        def check(fuzzed: FuzzedClient) -> None:
            fuzzed.hold({})
            rows = fuzzed.rows(sizes, shared=shared)
            keys = KEYS[: len(rows)]
            kind = SharedPut if shared else Put
            exchanges = fuzzed.fake.lie(kind, told, honest_in_the_end=honest)
            put = fuzzed.client.put(NAMESPACE, keys, rows, deferred=deferred, timeout_s=SHORT_S)
            result = put.result(PATIENCE_S)
            assert len(result.outcomes) == len(keys)
            assert all(one is None or one in PutOutcome for one in result.outcomes)
            if None in result.outcomes:
                assert isinstance(result.error, KVFerryError)
            fuzzed.fake.lie_again(exchanges, late)
            fuzzed.assert_all_is_well()
            for row in rows:
                assert row.tobytes().count(PATTERN) == row.nbytes
            fuzzed.assert_guards_stand(sizes, shared=shared)

        try_out(world, check)

    fuzz.run(one, examples=25)


# ── small requests ───────────────────────────────────────────────────────────────────────


def test_a_small_request_ends_whatever_is_answered(fuzz, world):
    def lookup(client: RemoteClient) -> None:
        found = client.lookup(NAMESPACE, KEYS, timeout_s=SHORT_S).result(PATIENCE_S)
        assert len(found.states) == len(KEYS)
        assert max(found.states) <= max(KeyState)
        readable = [state == KeyState.READABLE for state in found.states]
        assert found.prefix == (readable.index(False) if False in readable else len(KEYS))

    def touch(client: RemoteClient) -> None:
        assert isinstance(client.touch(NAMESPACE, KEYS, timeout_s=SHORT_S).result(PATIENCE_S), int)

    def stats(client: RemoteClient) -> None:
        assert isinstance(client.stats(timeout_s=SHORT_S).result(PATIENCE_S).counters, dict)

    asks: dict[type, Callable[[RemoteClient], None]] = {
        Lookup: lookup, Touch: touch, Stats: stats
    }  # fmt: skip

    @given(
        kind=st.sampled_from([Lookup, Lookup, Touch, Stats]), told=lies, late=lies,
        honest=mostly,
    )  # fmt: skip
    def one(kind, told, late, honest):
        def check(fuzzed: FuzzedClient) -> None:
            fuzzed.hold(dict.fromkeys(KEYS[::2], 64))
            exchanges = fuzzed.fake.lie(kind, told, honest_in_the_end=honest)
            with suppress(KVFerryError):
                asks[kind](fuzzed.client)
            fuzzed.fake.lie_again(exchanges, late)
            fuzzed.assert_all_is_well()

        try_out(world, check)

    fuzz.run(one, examples=25)


def test_whatever_a_welcome_says_the_next_honest_one_is_believed(fuzz, world):
    @given(told=lies, honest=mostly, wants=wants)
    def one(told, honest, wants):
        def check(fuzzed: FuzzedClient) -> None:
            blocks = fuzzed.hold({want.key: want.length for want in wants if want.there})
            exchanges = fuzzed.fake.lie(Hello, told, honest_in_the_end=honest)
            fuzzed.client.declare("liar's", 1)
            eventually(lambda: exchanges, "a hello")
            keys, sizes = [want.key for want in wants], [want.row for want in wants]
            for shared in (False, True):  # within the limits that the welcome may have set
                rows = fuzzed.rows(sizes, shared=shared)
                got = fuzzed.client.get(NAMESPACE, keys, rows, stall_s=SHORT_S)
                judge_get(got.result(PATIENCE_S), keys, rows, blocks)
            fuzzed.fake.behave()
            fuzzed.client.forget("liar's")
            fuzzed.assert_all_is_well()

        try_out(world, check)

    fuzz.run(one, examples=25)
