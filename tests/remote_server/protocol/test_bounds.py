"""Bounds of the protocol's checks, at the last value that is right and the first that is wrong."""

import pytest

from remote_server import protocol
from remote_server.errors import RemoteProtocolError, RequestRefused
from remote_server.protocol import MAX_KEYS_PER_MESSAGE, MAX_TOKENS, Lookup, Stretch, check_chain


def test_a_frame_that_is_a_byte_short_is_refused_as_one_that_is_too_long():
    lengths = [3, 2]
    assert len([*protocol.split_frames([memoryview(bytes(5))], lengths, 2)]) == 2
    for size in (4, 6):
        with pytest.raises(RemoteProtocolError, match=f"holds {size} bytes, announced 5"):
            protocol.split_frames([memoryview(bytes(size))], lengths, 2)


def test_a_stretch_may_end_with_the_last_token_and_not_behind_it():
    check_chain([Stretch(2, 0, MAX_TOKENS - 32, 16)], 2)
    with pytest.raises(RequestRefused, match=f"behind token {MAX_TOKENS}"):
        check_chain([Stretch(2, 0, MAX_TOKENS - 31, 16)], 2)


def test_one_binary_may_hold_the_most_keys_and_not_one_more():
    for number in (MAX_KEYS_PER_MESSAGE, MAX_KEYS_PER_MESSAGE + 1):
        keys = [n.to_bytes(2) for n in range(number)]
        _, header = protocol.encode(Lookup(request_id=1, namespace="ns", keys=keys, key_bytes=2))
        if number == MAX_KEYS_PER_MESSAGE:
            assert protocol.decode_request(header).keys == keys
        else:
            with pytest.raises(RemoteProtocolError, match=f"{number} keys, at most"):
                protocol.decode_request(header)
