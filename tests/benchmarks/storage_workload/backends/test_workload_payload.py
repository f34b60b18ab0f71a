"""Bytes that a drive can make nothing of."""

import hashlib
import zlib

from benchmarks.storage_workload.backends.payload import Payload

MiB = 1 << 20


def made(key: bytes, num_bytes: int, seed: int = 1) -> bytes:
    block = bytearray(num_bytes)
    Payload(seed, 2 * MiB, noise_bytes=4 * MiB).fill(memoryview(block), key)
    return bytes(block)


def test_a_key_always_has_the_same_bytes_and_no_two_keys_do():
    assert made(b"a", 50_000) == made(b"a", 50_000)
    assert made(b"a", 50_000) != made(b"b", 50_000)
    assert made(b"a", 50_000) != made(b"a", 50_000, seed=2)
    assert made(b"a", 30_001) != made(b"b", 30_001)
    assert len(made(b"a", 3)) == 3


def test_no_page_comes_twice_in_64_mib_though_the_noise_does_many_times():
    payload = Payload(1, 2 * MiB, noise_bytes=4 * MiB)
    pages = set()
    for number in range(32):
        block = bytearray(2 * MiB)
        payload.fill(memoryview(block), b"key %d" % number)
        pages |= {
            hashlib.sha256(block[at : at + 4096]).digest() for at in range(0, len(block), 4096)
        }
    assert len(pages) == 32 * 512


def test_it_does_not_compress():
    block = made(b"a", 2 * MiB)
    assert len(zlib.compress(block, 6)) > 0.99 * len(block)
