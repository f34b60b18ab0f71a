"""Native hashes and copies of every length, alignment and cut, judged by the package xxhash."""

import ctypes
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash
from mover_helpers import need_library

from remote_server.native.library import PATH

MOST = 65_536
GUARD = 64
UNTOUCHED = 0xA5


class Hash(ctypes.Structure):
    """`struct kvf_hash` of bytes.h."""

    _fields_ = (
        ("lanes", ctypes.c_uint64 * 8),
        ("numbers", ctypes.c_uint64 * 3),
        ("secret", ctypes.c_uint8 * 192),
        ("kept", ctypes.c_uint8 * 256),
    )


class Native:
    """The functions of bytes.h, over addresses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        u64, address, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
        self.hash = Hash()
        self._state = ctypes.addressof(self.hash)
        self.instructions = library.kvf_instructions
        self.instructions.restype = ctypes.c_char_p
        self.use = library.kvf_use_instructions
        self.xxh3 = library.kvf_xxh3
        self.xxh3.argtypes, self.xxh3.restype = (address, size, u64), u64
        self._begin = library.kvf_hash_begin
        self._begin.argtypes, self._begin.restype = (address, u64, u64), None
        self._piece = library.kvf_hash_piece
        self._piece.argtypes, self._piece.restype = (address, address, size), None
        self._end = library.kvf_hash_end
        self._end.argtypes, self._end.restype = (address,), u64
        self._copy = library.kvf_copy_piece
        self._copy.argtypes = (address, address, address, size, ctypes.c_bool)
        self._copy.restype = None

    def hash_pieces(self, source: int, pieces: Sequence[int], seed: int) -> int:
        self._begin(self._state, seed, sum(pieces))
        for size in pieces:
            self._piece(self._state, source, size)
            source += size
        return self._end(self._state)

    def copy_pieces(
        self, target: int, source: int, pieces: Sequence[int], seed: int, *, stream: bool
    ) -> int:
        """The digest of what was copied."""
        self._begin(self._state, seed, sum(pieces))
        for size in pieces:
            self._copy(self._state, target, source, size, stream)
            source += size
            target += size
        return self._end(self._state)

    def copy(self, target: int, source: int, size: int, *, stream: bool) -> None:
        self._copy(None, target, source, size, stream)

    def copy_and_hash_less(self, target: int, source: int, size: int, hashed: int) -> int:
        """The digest of the first `hashed` bytes of one piece that has more."""
        self._begin(self._state, 0, hashed)
        self._copy(self._state, target, source, size, True)
        return self._end(self._state)


class Memory:
    """Bytes whose first address is a multiple of 64, and 64 bytes before and behind them."""

    def __init__(self, size: int) -> None:
        self._buffer = ctypes.create_string_buffer(size + 3 * GUARD)
        self.address = -(-ctypes.addressof(self._buffer) // GUARD) * GUARD + GUARD
        self._end = ctypes.addressof(self._buffer) + len(self._buffer)

    def forget(self, at: int, size: int) -> None:
        """Fill `size` bytes at `at`, and those around them, with what no copy leaves by chance."""
        ctypes.memset(at - GUARD, UNTOUCHED, min(at + size + GUARD, self._end) - at + GUARD)

    def is_copy(self, at: int, size: int, of: int) -> bool:
        """True if `size` bytes at `at` are those at `of`, and the bytes around are as before."""
        behind = min(GUARD, self._end - at - size)
        return (
            same(at, of, size)
            and ctypes.string_at(at - GUARD, GUARD) == bytes([UNTOUCHED]) * GUARD
            and ctypes.string_at(at + size, behind) == bytes([UNTOUCHED]) * behind
        )


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset = ctypes.CDLL(None).memset  # one that releases the GIL
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)


def same(one: int, other: int, size: int) -> bool:
    return _memcmp(one, other, size) == 0


def cut(size: int, chance: random.Random) -> list[int]:
    """Pieces of `size` bytes: all but the last are multiples of 4096."""
    pieces = []
    while size > 4096 and chance.random() < 0.7:
        pieces.append(chance.randint(1, size // 4096) * 4096)
        size -= pieces[-1]
    return [*pieces, size]


def seed_of(chance: random.Random) -> int:
    return chance.choice((0, 1, 2**64 - 1, *(chance.getrandbits(64) for _ in range(5))))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    need_library()
    return ctypes.CDLL(str(PATH))


@pytest.fixture(params=["plain", "avx2", "avx512"])
def native(request: pytest.FixtureRequest, library: ctypes.CDLL) -> Iterator[Native]:
    native = Native(library)
    best = native.instructions()
    if native.use(request.param.encode()) != 0:
        pytest.skip(f"this processor lacks {request.param}")
    yield native
    assert native.use(best) == 0


@pytest.fixture(scope="module")
def text() -> Memory:
    memory = Memory(MOST + GUARD)
    ctypes.memmove(memory.address, random.Random(3).randbytes(MOST + GUARD), MOST + GUARD)
    return memory


@pytest.fixture(scope="module")
def cases(text: Memory, pytestconfig: pytest.Config) -> list[tuple[int, int, int, int]]:
    """For each length to 64 KiB the length, an offset in `text`, a seed, and the digest. Above the
    lengths at which another form of the hash begins, these are few without `--whole`."""
    chance = random.Random(5)
    view = memoryview(ctypes.string_at(text.address, MOST + GUARD))
    cases = []
    sizes = [*range(MOST + 1)]
    if not pytestconfig.getoption("--whole"):
        sizes = [*range(2200), *sorted(chance.sample(range(2200, MOST), 500)), MOST]
    for size in sizes:
        offset, seed = chance.randrange(GUARD), seed_of(chance)
        digest = xxhash.xxh3_64_intdigest(view[offset : offset + size], seed)
        cases.append((size, offset, seed, digest))
    return cases


def test_every_length_to_64_kib_has_the_digest_of_xxhash(native, text, cases) -> None:
    wrong = [
        size
        for size, offset, seed, digest in cases
        if native.xxh3(text.address + offset, size, seed) != digest
    ]
    assert wrong == []


def test_every_length_is_hashed_alike_in_pieces_of_any_size(native, text, cases) -> None:
    chance = random.Random(7)
    wrong = [
        (size, pieces)
        for size, offset, seed, digest in cases
        if native.hash_pieces(text.address + offset, pieces := cut(size, chance), seed) != digest
    ]
    assert wrong == []


def test_every_length_is_copied_in_pieces_with_its_digest_and_nothing_beside_it(
    native, text, cases
) -> None:
    chance = random.Random(11)
    memory = Memory(MOST + GUARD)
    wrong = []
    for size, offset, seed, digest in cases:
        target = memory.address + chance.choice((0, 0, chance.randrange(GUARD)))
        source, pieces, stream = text.address + offset, cut(size, chance), chance.random() < 0.5
        memory.forget(target, size)
        got = native.copy_pieces(target, source, pieces, seed, stream=stream)
        if got != digest or not memory.is_copy(target, size, source):
            wrong.append((size, offset, pieces, stream))
    assert wrong == []


@pytest.mark.parametrize("stream", [False, True])
def test_source_and_target_may_have_any_alignment(native, text, cases, stream) -> None:
    chance = random.Random(13)
    memory = Memory(3 * 4096)
    size_digests = [case for case in cases if case[0] <= 2 * 4096 + 700]
    wrong = []
    for offset in range(GUARD):
        for place in range(offset % 4, GUARD, 4):
            size, _, seed, _ = chance.choice(size_digests)
            source, target = text.address + offset, memory.address + place
            memory.forget(target, size)
            got = native.copy_pieces(target, source, cut(size, chance), seed, stream=stream)
            is_copy = memory.is_copy(target, size, source)
            memory.forget(target, size)
            native.copy(target, source, size, stream=stream)
            digest = xxhash.xxh3_64_intdigest(ctypes.string_at(source, size), seed)
            if got != digest or not is_copy or not memory.is_copy(target, size, source):
                wrong.append((offset, place, size))
    assert wrong == []


@pytest.mark.parametrize("hashed", [0, 5, 240, 241, 256, 4096, 8191])
def test_bytes_past_the_length_of_the_block_are_copied_and_not_hashed(native, text, hashed) -> None:
    memory = Memory(MOST)
    for size in (hashed, hashed + 1, hashed + 64, hashed + 5000):
        memory.forget(memory.address + 8, size)
        digest = native.copy_and_hash_less(memory.address + 8, text.address, size, hashed)
        assert digest == xxhash.xxh3_64_intdigest(ctypes.string_at(text.address, hashed))
        assert memory.is_copy(memory.address + 8, size, text.address)


class Scribbler(threading.Thread):
    """Changes the source without end, as a process does that shares its memory."""

    def __init__(self, address: int, size: int) -> None:
        super().__init__()
        self._source, self._stops = (address, size), threading.Event()

    def run(self) -> None:
        address, size = self._source
        value = 0
        while not self._stops.is_set():
            value = (value + 1) % 256
            _memset(address, value, size)

    def stop(self) -> None:
        self._stops.set()
        self.join()


@pytest.mark.parametrize("place", [0, 24], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_digest_is_that_of_the_stored_bytes_while_the_source_changes(
    native, stream, place
) -> None:
    size = 256 * 1024 + 77
    source, memory = Memory(size), Memory(size + GUARD)
    target = memory.address + place
    scribbler = Scribbler(source.address, size)
    scribbler.start()
    changed, deadline = 0, time.monotonic() + 60
    try:
        while changed < 3 and time.monotonic() < deadline:
            digest = native.copy_pieces(target, source.address, [size], 9, stream=stream)
            stored = ctypes.string_at(target, size)
            assert digest == xxhash.xxh3_64_intdigest(stored, 9)
            changed += len(set(stored[::4096])) > 1  # the source changed during this copy
    finally:
        scribbler.stop()
    assert changed == 3


def test_the_best_instructions_of_the_processor_are_chosen_and_unknown_ones_refused(
    library,
) -> None:
    native = Native(library)
    flags = set(Path("/proc/cpuinfo").read_text().split())
    best = next((name for flag, name in (("avx512f", b"avx512"), ("avx2", b"avx2"))
                 if flag in flags), b"plain")  # fmt: skip
    assert native.instructions() == best
    for name in (b"", b"avx", b"avx512f"):
        assert native.use(name) == -1
        assert native.instructions() == best
    assert native.use(b"plain") == 0
    assert native.instructions() == b"plain"
    assert native.use(best) == 0
