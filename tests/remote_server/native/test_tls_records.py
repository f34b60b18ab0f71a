"""Records of encrypted lanes that OpenSSL itself sends and reads: other keys, padding, a close."""

import ctypes
import errno
from contextlib import closing
from socket import socket

import pytest
from lane_helpers import Blocks, connected, random_blocks, reap, reaped
from lane_peer import frame
from mover_helpers import until
from tls_helpers import a_certificate

from remote_server.native import make_tls_context, why_no_tls

pytest_plugins = ["engine_of_lanes_fixtures"]

pytestmark = [
    pytest.mark.real_time,
    pytest.mark.skipif(bool(why_no_tls()), reason=why_no_tls() or "none"),
]

KiB = 1 << 10

MiB = 1 << 20

_NOT_REQUESTED, _REQUESTED = 0, 1

_HANDSHAKE, _KEY_UPDATE = 22, 24

_ON_MESSAGE = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint8),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)


class OpensslClient:
    """A client of OpenSSL by `ctypes`: the module `ssl` offers neither key updates nor padding."""

    def __init__(self, connection: socket) -> None:
        self._library = library = ctypes.CDLL("libssl.so.3")
        for name in ("TLS_client_method", "SSL_CTX_new", "SSL_new"):
            getattr(library, name).restype = ctypes.c_void_p
        context = ctypes.c_void_p(library.SSL_CTX_new(ctypes.c_void_p(library.TLS_client_method())))
        self._ssl = ctypes.c_void_p(library.SSL_new(context))
        library.SSL_CTX_free(context)
        self._connection = connection
        self.updates = 0
        self._on_message = _ON_MESSAGE(self._see)
        library.SSL_set_msg_callback(self._ssl, self._on_message)
        library.SSL_set_fd(self._ssl, connection.fileno())

    def _see(self, is_sent: int, _version: int, kind: int, message, *_: object) -> None:
        self.updates += (not is_sent) and kind == _HANDSHAKE and message[0] == _KEY_UPDATE

    def call(self, name: str, *arguments) -> int:
        result = getattr(self._library, name)(self._ssl, *arguments)
        assert isinstance(result, int)
        return result

    def write(self, data: bytes) -> None:
        """Of a few bytes, which the connection has room for."""
        assert self.call("SSL_write", data, len(data)) == len(data)

    def read(self, size: int) -> bytes:
        got, memory = bytearray(), ctypes.create_string_buffer(16 * KiB)

        def is_all() -> bool:
            count = 1
            while count > 0 and len(got) < size:
                count = self.call("SSL_read", memory, min(size - len(got), len(memory)))
                got.extend(memory.raw[: max(count, 0)])
            return len(got) == size

        until(is_all)
        return bytes(got)

    def close(self) -> None:
        self.call("SSL_free")
        self._connection.close()


@pytest.fixture
def openssl(lanes):
    """A lane, and its peer."""
    near, far = connected()
    near.setblocking(False)
    far.setblocking(False)
    server = make_tls_context(a_certificate()).wrap(near)
    with closing(OpensslClient(far)) as client:

        def is_complete() -> bool:
            try:
                server.handshake()
            except BlockingIOError:
                client.call("SSL_connect")
                return False
            return client.call("SSL_connect") == 1

        until(is_complete)
        yield lanes.open(server), client


def pass_both_ways(lanes, lane: int, client: OpensslClient, lengths) -> None:
    source, target = random_blocks(lengths), Blocks(lengths)
    jobs = [source.send(1), target.receive(2)]
    for job in jobs:
        lanes.submit(lane, job)
    client.write(source.frames(2))
    assert client.read(len(source.frames(1))) == source.frames(1)
    assert {*reaped(lanes, 2)} == {*jobs}
    assert target.memory.map[:] == source.memory.map[:]


@pytest.mark.parametrize("kind", [_NOT_REQUESTED, _REQUESTED])
def test_a_peer_takes_other_keys_and_may_request_ours(lanes, openssl, kind):
    lane, client = openssl
    for _ in range(3):
        pass_both_ways(lanes, lane, client, [3, 40 * KiB])
        assert client.call("SSL_key_update", kind) == 1


def test_updates_without_bytes_break_the_lane(engine, lanes, openssl):
    """Each costs a derivation of keys, and the peer nothing."""
    if engine == "python":
        pytest.skip("OpenSSL has no such limit")
    lane, client = openssl
    for _ in range(40):
        assert client.call("SSL_key_update", _NOT_REQUESTED) == 1
        assert client.call("SSL_do_handshake") == 1
    lanes.submit(lane, Blocks([3]).receive(2))
    _, [(broken, error)] = reap(lanes, 1, 1)
    assert (broken, error) == (lane, errno.EPROTO)


@pytest.mark.parametrize("multiple", [64, 16 * KiB])
def test_padding_is_no_part_of_blocks(lanes, openssl, multiple):
    lane, client = openssl
    client.call("SSL_set_block_padding", ctypes.c_size_t(multiple))
    pass_both_ways(lanes, lane, client, [0, 3, 1500, 30 * KiB, 7])


def test_a_peer_that_closes_tls_has_closed_the_lane(lanes, openssl):
    """Bytes behind its last record are not blocks."""
    lane, client = openssl
    whole, missing = Blocks([5]).receive(1), Blocks([5]).receive(2)
    lanes.submit(lane, whole)
    lanes.submit(lane, missing)
    client.write(frame(1, 0, b"whole"))
    client.call("SSL_shutdown")
    jobs, [(broken, error)] = reap(lanes, 2, 1)
    assert jobs == [whole, missing]
    assert [job.errors[0] for job in jobs] == [0, errno.ECONNRESET]
    assert (broken, error) == (lane, errno.ECONNRESET)


def test_a_peer_that_closes_tls_within_a_job_ends_it(lanes, openssl):
    """The close has come with the job's first block, the connection stays: no event follows."""
    lane, client = openssl
    job = Blocks([5, 5]).receive(1)
    client.write(frame(1, 0, b"whole"))
    client.call("SSL_shutdown")
    lanes.submit(lane, job)
    jobs, [(broken, error)] = reap(lanes, 1, 1)
    assert jobs == [job]
    assert [*job.errors] == [0, errno.ECONNRESET]
    assert (broken, error) == (lane, errno.ECONNRESET)


def test_keys_are_replaced_often_enough_for_their_cipher(engine, lanes, openssl):
    """AES-GCM is safe for 2^24.5 records of one key."""
    if engine == "python":
        pytest.skip("`ssl` of Python has no key updates")
    lane, client = openssl
    source = random_blocks([MiB] * 16)
    for request in range(1, 6):
        job = source.send(request)
        lanes.submit(lane, job)
        assert client.read(len(source.frames(request))) == source.frames(request)
        assert reaped(lanes, 1) == [job]
    assert client.updates == 1
