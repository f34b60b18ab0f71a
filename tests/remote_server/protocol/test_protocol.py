"""The bytes on the wire, kept here so that they cannot drift unnoticed."""

import re
from pathlib import Path

import msgpack
import msgspec
import pytest

import remote_server
from remote_server import protocol
from remote_server.errors import RemoteProtocolError
from remote_server.histograms import Timings
from remote_server.protocol import (
    BlockCopy,
    Blocks,
    BucketCalls,
    BucketStats,
    Declined,
    ErrorCode,
    EvictionStats,
    Get,
    Got,
    Hello,
    Hint,
    Leased,
    LeaseRequest,
    LocalMessage,
    Lookup,
    Put,
    PutOutcome,
    Record,
    Recorded,
    RecordedRequest,
    Reply,
    Request,
    ServerLoad,
    SharedRows,
    Stored,
    Stretch,
    Touch,
    Welcome,
)
from remote_server.store.disk import tier as disk_tier
from remote_server.store.stack import tier_stack, write_behind
from remote_server.store.store import COUNTERS

DOCUMENT = (Path(remote_server.__file__).parent / "PROTOCOL.md").read_text()

GOLDEN = [
    (
        Hello(request_id=1, protocol=2, namespace="example", block_bytes=4096),
        "85a474797065a568656c6c6fa870726f746f636f6c02a96e616d657370616365a76578616d706c65"
        "ab626c6f636b5f6279746573cd1000aa726571756573745f696401",
    ),
    (
        Lookup(request_id=2, namespace="example", keys=[b"\0\1\2\3"]),
        "84a474797065a66c6f6f6b7570a96e616d657370616365a76578616d706c65"
        "a46b65797391c40400010203aa726571756573745f696402",
    ),
    (
        Put(
            request_id=3, namespace="n", keys=[b"k"], lengths=[4096], checksums=[(1 << 64) - 1],
            deferred=False,
        ),
        "87a474797065a3707574a96e616d657370616365a16ea46b65797391c4016b"
        "a76c656e6774687391cd1000a9636865636b73756d7391cfffffffffffffffff"
        "a86465666572726564c2aa726571756573745f696403",
    ),
    (
        Got(request_id=4, epoch="e", total=3, hit=1, miss=1, duplicate=1, found=[0]),
        "88a474797065a3676f74a565706f6368a165a5746f74616c03a368697401a46d69737301"
        "a96475706c696361746501a5666f756e649100aa726571756573745f696404",
    ),
    (
        Put(
            request_id=5, namespace="n", keys=[b"k"], lengths=[1], checksums=[2],
            shared=SharedRows(region=3, offsets=[4], ticket=5, ticket_value=6),
        ),
        "87a474797065a3707574a96e616d657370616365a16ea46b65797391c4016ba76c656e6774687391"
        "01a9636865636b73756d739102a673686172656484a6726567696f6e03a76f6666736574739104a6"
        "7469636b657405ac7469636b65745f76616c756506aa726571756573745f696405",
    ),
    (
        Get(request_id=6, namespace="n", keys=[b"k"], shared=LeaseRequest(region=3, release=[4])),
        "85a474797065a3676574a96e616d657370616365a16ea46b65797391c4016ba673686172656482a6"
        "726567696f6e03a772656c656173659104aa726571756573745f696406",
    ),
    (
        Lookup(
            request_id=7, namespace="n", keys=[b"a", b"b", b"c"],
            chain=[Stretch(2, 1, 64, 32, 96, window=5), Stretch(1, 0, 0, 16)],
        ),
        "85a474797065a66c6f6f6b7570a96e616d657370616365a16ea46b65797393c40161c40162c40163"
        "a5636861696e92970201402060c2059701000010ffc200aa726571756573745f696407",
    ),
    (
        Got(
            request_id=7, epoch="e", total=1, hit=1, miss=0, duplicate=0, found=[0], lengths=[8],
            checksums=[9],
            lease=Leased(number=1, lease_ms=2, offsets=[3], words=[4], generations=[5]),
        ),
        "8ba474797065a3676f74a565706f6368a165a5746f74616c01a368697401a46d69737300a9647570"
        "6c696361746500a5666f756e649100a76c656e677468739108a9636865636b73756d739109a56c65"
        "61736585a66e756d62657201a86c656173655f6d7302a76f6666736574739103a5776f7264739104"
        "ab67656e65726174696f6e739105aa726571756573745f696407",
    ),
    (
        Hello(
            request_id=8, protocol=2, namespace="n", block_bytes=1, server="kvferry-3",
            fleet="00112233445566ff",
        ),
        "87a474797065a568656c6c6fa870726f746f636f6c02a96e616d657370616365a16eab626c6f636b"
        "5f627974657301a6736572766572a96b7666657272792d33a5666c656574b030303131323233333434"
        "353536366666aa726571756573745f696408",
    ),
    (
        Stored(
            request_id=9, epoch="e", total=1, created=1, existed=0, forced=0, duplicate=0,
            declined={}, outcomes=b"\0", load=ServerLoad(500, 1.5, 2.0),
        ),
        "8ba474797065a673746f726564a565706f6368a165a5746f74616c01a76372656174656401a76578"
        "697374656400a6666f7263656400a96475706c696361746500a86465636c696e656480a86f757463"
        "6f6d6573c40100a46c6f616494cd01f4cb3ff8000000000000cb4000000000000000c2aa72657175"
        "6573745f696409",
    ),
    (
        Put(
            request_id=8, namespace="n", keys=[b"a\0", b"\0\0"], lengths=[1, 2], checksums=[3, 4],
            key_bytes=2,
        ),
        "87a474797065a3707574a96e616d657370616365a16ea46b657973c40461000000a76c656e677468"
        "73920102a9636865636b73756d73920304a96b65795f627974657302aa726571756573745f696408",
    ),
    (
        Get(request_id=9, namespace="n", keys=[b"a0", b"b1"], stream=False, key_bytes=2),
        "86a474797065a3676574a96e616d657370616365a16ea46b657973c40461306231a673747265616dc2"
        "a96b65795f627974657302aa726571756573745f696409",
    ),
    (
        Touch(request_id=10, namespace="n", keys=[b"a0"], key_bytes=2),
        "85a474797065a5746f756368a96e616d657370616365a16ea46b657973c4026130a96b65795f6279"
        "74657302aa726571756573745f69640a",
    ),
    (
        Lookup(
            request_id=10, namespace="n", keys=[b"a"], chain=[Stretch(1, 0, 0, 16)],
            hint=Hint(True, 300.0),
        ),
        "86a474797065a66c6f6f6b7570a96e616d657370616365a16ea46b65797391c40161a5636861696e"
        "919701000010ffc200a468696e7492c3cb4072c00000000000aa726571756573745f69640a",
    ),
    (
        Record(request_id=11, after=7),
        "83a474797065a67265636f7264a5616674657207aa726571756573745f69640b",
    ),
    (
        Recorded(
            request_id=11, epoch="e", recording=1, now_s=2.5, last=8,
            requests=[
                RecordedRequest(
                    "lookup", 1.5, "n", 4096, b"a0b1", 2, [Stretch(2, 0, 0, 16)], b"\2\0"
                )
            ],
        ),
        "87a474797065a87265636f72646564a565706f6368a165a97265636f7264696e6701a56e6f775f73"
        "cb4004000000000000a46c61737408a872657175657374739198a66c6f6f6b7570cb3ff800000000"
        "0000a16ecd1000c4046130623102919702000010ffc200c4020200aa726571756573745f69640b",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda value: type(value).__name__)
def test_headers_have_the_bytes_they_always_had(message, golden):
    magic, header = protocol.encode(message)
    assert magic == b"KVF1"
    assert header.hex() == golden
    decode = protocol.decode_request if isinstance(message, Request) else protocol.decode_reply
    assert decode(header) == message


def test_a_newer_peer_may_say_more():
    header = msgpack.packb({"type": "stats", "request_id": 1, "colour": {"deep": [1, None]}})
    assert protocol.decode_request(header).request_id == 1


@pytest.mark.parametrize(
    "header",
    [b"", b"\xc1", b"\x91" * 100_000, b"\x81\xa4type\xa5st\xffts", b"\xdd\xff\xff\xff\xff"],
)
def test_whatever_the_bytes_a_bad_header_is_a_protocol_error(header):
    for decode in (protocol.decode_request, protocol.decode_reply):
        with pytest.raises(RemoteProtocolError):
            decode(header)
    assert protocol.request_id_of(header) == 0


def test_a_reply_is_no_request_and_the_other_way_round():
    with pytest.raises(RemoteProtocolError):
        protocol.decode_request(protocol.encode(GOLDEN[3][0])[1])
    with pytest.raises(RemoteProtocolError):
        protocol.decode_reply(protocol.encode(GOLDEN[0][0])[1])


def test_the_checksum_of_the_document():
    key, block = bytes(range(36)), bytes(range(256)) * 16
    assert protocol.checksum("example", key, block) == 0x632C95CDDCFA0D48


@pytest.mark.parametrize(
    ("sizes", "lengths", "per_frame"),
    [([3, 2, 1], [3, 2, 1], 1), ([5, 1], [3, 2, 1], 2), ([6], [3, 2, 1], 3), ([6], [3, 2, 1], 99),
     ([], [], 1)],
)  # fmt: skip
def test_blocks_are_cut_from_their_frames(sizes, lengths, per_frame):
    data = bytes(range(sum(sizes)))
    frames, start = [], 0
    for size in sizes:
        frames.append(memoryview(data)[start : start + size])
        start += size
    blocks = [bytes(view) for view in protocol.split_frames(frames, lengths, per_frame)]
    assert [len(block) for block in blocks] == lengths
    assert b"".join(blocks) == data


@pytest.mark.parametrize(
    ("sizes", "lengths", "per_frame"),
    [([3], [3, 2], 1), ([3, 2, 0], [3, 2], 1), ([3, 3], [3, 2], 1), ([2, 3], [3, 2], 1),
     ([5, 0], [3, 2], 2), ([4], [3, 2], 2), ([6], [3, 2], 2), ([], [1], 1), ([1], [], 1)],
)  # fmt: skip
def test_frames_that_do_not_hold_what_was_announced_are_refused_at_once(sizes, lengths, per_frame):
    frames = [memoryview(bytes(size)) for size in sizes]
    with pytest.raises(RemoteProtocolError):
        protocol.split_frames(frames, lengths, per_frame)


# ── the document ─────────────────────────────────────────────────────────────────────────


MESSAGES = [*Request.__args__, *Reply.__args__, *LocalMessage.__args__]
PARTS = [
    SharedRows, LeaseRequest, Leased, BlockCopy, BucketStats, BucketCalls, Timings, ServerLoad,
    EvictionStats, Hint, RecordedRequest,
]  # fmt: skip
"""Fields of messages that have fields themselves."""


@pytest.mark.parametrize("message", MESSAGES + PARTS)
def test_the_document_names_every_message_and_field(message):
    assert message in PARTS or re.search(rf"\b{message.__struct_config__.tag}\b", DOCUMENT)
    for field in msgspec.structs.fields(message):
        assert f"`{field.name}" in DOCUMENT, f"{message.__name__}.{field.name}"


def test_the_document_shows_the_defaults_of_fields_that_may_be_left_out():
    for message in (Hello, Put, Get, Got, Blocks, Welcome, LeaseRequest):
        for field in msgspec.structs.fields(message):
            if field.default is not msgspec.NODEFAULT and not isinstance(field.default, list):
                default = msgspec.json.encode(field.default).decode().replace("null", "nil")
                assert re.search(rf"`{field.name}: [^`]* = {default}", DOCUMENT), field.name


@pytest.mark.parametrize("name", [*ErrorCode, *Declined, *(o.name.lower() for o in PutOutcome)])
def test_the_document_names_every_code_and_reason(name):
    assert re.search(rf"\b{name}\b", DOCUMENT)


@pytest.mark.parametrize(
    "name", [*COUNTERS, *disk_tier.COUNTERS, *tier_stack.COUNTERS, *write_behind.COUNTERS]
)
def test_the_document_names_every_counter(name):
    assert f"`{name}`" in DOCUMENT
