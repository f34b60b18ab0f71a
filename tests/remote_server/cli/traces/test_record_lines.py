"""Lines of a recorded trace: which requests are one, which puts are written, how ids are made."""

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from itertools import chain as joined
from typing import Any

import msgspec
import pytest

from remote_server.cli.traces import record_lines
from remote_server.cli.traces.record_lines import ID_BITS, Lines, foot, head
from remote_server.errors import RemoteProtocolError
from remote_server.protocol import KeyState, RecordedRequest, Stretch
from remote_server.store.eviction.learner import AGAIN_S, REQUEST_S

HERE, ABSENT, PENDING = KeyState.READABLE, KeyState.ABSENT, KeyState.PENDING
BLOCK_BYTES = 4096


def key(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def lookup(
    numbers: Sequence[int], at_s: float = 0.0, found: int = 0, first: int = 0, **fields: Any
) -> RecordedRequest:
    """Of a prompt's blocks of 16 tokens from number `first` on."""
    states = bytes([HERE] * found + [ABSENT] * (len(numbers) - found))
    return request("lookup", numbers, at_s, **{
        "states": states, "chain": [Stretch(len(numbers), 0, first * 16, 16)], **fields
    })  # fmt: skip


def put(numbers: Sequence[int], at_s: float = 0.0, first: int = 0) -> RecordedRequest:
    return request("put", numbers, at_s, [Stretch(len(numbers), 0, first * 16, 16)])


def get(number: int, at_s: float = 0.0) -> RecordedRequest:
    return request("get", [number], at_s)


def request(
    kind: str, numbers: Sequence[int], at_s: float, chain: Sequence[Stretch] = (),
    states: bytes = b"", namespace: str = "model", block_bytes: int = BLOCK_BYTES,
) -> RecordedRequest:  # fmt: skip
    keys = b"".join(map(key, numbers))
    return RecordedRequest(kind, at_s, namespace, block_bytes, keys, 32, [*chain], states)


def written(*requests: RecordedRequest, lines: Lines | None = None) -> list[dict[str, Any]]:
    """The lines of `requests`, with numbers in place of ids: in the order of their appearance."""
    lines = lines or Lines()
    lines.take(requests)
    found = [json.loads(line) for line in lines.rest()]
    seen: dict[int, int] = {}
    for line in found:
        line["hash_ids"] = [seen.setdefault(one, len(seen)) for one in line["hash_ids"]]
    return found


def test_a_line_has_the_fields_of_the_format_in_its_order():
    (line,) = written(lookup([1, 2, 3], 7.0, found=1))
    assert [*line.items()] == [
        ("timestamp", 0), ("type", "lookup"), ("namespace", 0), ("block_size", 16),
        ("block_bytes", BLOCK_BYTES), ("input_length", 48), ("output_length", 0),
        ("hash_ids", [0, 1, 2]), ("found", 1), ("group", 0),
    ]  # fmt: skip


def test_the_first_line_has_the_version_and_the_last_one_the_counts():
    lines = Lines()
    assert len(written(lookup([1]), put([2]), lines=lines)) == 2
    assert json.loads(head("kvferry 1", {"memory": 5})) == {
        "kvferry_trace": 1, "software": "kvferry 1", "tiers": {"memory": 5},
    }  # fmt: skip
    assert json.loads(foot(lines, 3)) == {"end": True, "requests": 2, "lost": 3}


def test_times_are_ms_since_the_first_request_and_namespaces_are_numbers():
    one = lookup([1], 1000.0)
    other = lookup([1], 1002.3456, namespace="secret model")
    assert [(line["timestamp"], line["namespace"]) for line in written(one, other)] == [
        (0, 0), (2346, 1),
    ]  # fmt: skip


def test_a_lookup_that_begins_in_its_prompt_ends_at_its_end():
    """`input_length` are the tokens up to the end of the last block, found or not."""
    (line,) = written(lookup([1, 2], first=5))
    assert (line["input_length"], len(line["hash_ids"])) == (7 * 16, 2)


def test_found_are_the_blocks_before_the_first_that_is_missing():
    states = bytes([HERE, HERE, PENDING, HERE])
    (line,) = written(lookup(range(4), states=states))
    assert line["found"] == 2
    window = [Stretch(4, 0, 0, 16, window=2)]
    (line,) = written(lookup(range(4), states=bytes([ABSENT, ABSENT, HERE, HERE]), chain=window))
    assert line["found"] == 2, "of a window the blocks before it are not needed"


def test_a_backwards_stretch_is_written_from_its_first_token_on():
    backwards = [Stretch(3, 0, 4 * 16, 16, backwards=True)]
    line, again = written(
        lookup([3, 2, 1], chain=backwards, states=bytes([ABSENT, HERE, HERE])),
        lookup([1, 2, 3], 5.0, first=2),
    )
    assert line["hash_ids"] == again["hash_ids"]
    assert line["input_length"] == again["input_length"] == 5 * 16
    assert line["found"] == 2


def test_each_group_of_a_prompt_has_a_line():
    chain = [Stretch(1, 0, 0, 16), Stretch(1, 0, 16, 16), Stretch(1, 3, 0, 32, window=1)]
    whole, half = written(lookup([1, 2, 3], found=3, chain=chain))
    assert (whole["group"], whole["block_size"], whole["hash_ids"]) == (0, 16, [0, 1])
    assert (half["group"], half["block_size"], half["hash_ids"]) == (3, 32, [2])
    assert whole["input_length"] == half["input_length"] == 32


@pytest.mark.parametrize(
    ("requests", "number"),
    [
        ([lookup([1, 2]), lookup([1, 2], AGAIN_S * 0.9)], 1),
        ([lookup([1, 2]), lookup([1, 2], AGAIN_S)], 2),
        ([lookup([1, 2]), get(1, 0.1), lookup([1, 2], 0.2)], 2),
        ([lookup([1, 2]), put([2], 0.1, first=1), lookup([1, 2], 0.2)], 2),
        ([lookup([1, 2]), get(1, 0.1), lookup([2], 0.2, first=1)], 1),
        ([lookup([1, 2]), lookup([1], 0.1)], 2),
        ([lookup([1, 2]), lookup([1, 2], 0.1, namespace="another")], 2),
    ],
    ids=["soon", "later", "got between", "put between", "its rest", "another end", "elsewhere"],
)
def test_a_repeated_lookup_is_the_same_request_until_that_is_served(requests, number):
    assert len(written(*requests)) == number


def test_of_a_repeated_lookup_the_last_answer_counts():
    """The first one may have met blocks that were being written."""
    (line,) = written(lookup([1, 2]), lookup([1, 2], 0.5, found=2))
    assert line["found"] == 2
    assert line["timestamp"] == 0


def test_a_line_is_due_when_no_repetition_can_change_it():
    lines = Lines()
    lines.take([lookup([1], 10.0), lookup([2], 10.5)])
    assert not [*lines.due(10.9)]
    assert len([*lines.due(11.0)]) == 1
    assert len([*lines.due(99.0)]) == 1


def test_of_a_put_the_blocks_that_no_lookup_named_are_written():
    asked, one, other = written(
        lookup([1, 2, 3]), put([1, 2], 1.0), put([9, 3, 4, 5], 2.0), put([2], 2.0, first=1)
    )
    assert asked["type"] == "lookup"
    assert (one["type"], one["hash_ids"], one["input_length"]) == ("put", [3], 16)
    assert (other["type"], other["hash_ids"], other["input_length"]) == ("put", [4, 5], 64)
    assert one["found"] == other["found"] == 0


def test_a_put_long_after_the_lookup_of_its_blocks_is_written():
    _, line = written(lookup([1]), put([1], REQUEST_S))
    assert line["type"] == "put"


def test_what_lookups_named_is_bounded(monkeypatch):
    monkeypatch.setattr(record_lines, "MOST_NAMED", 8)
    prompts = [lookup([*range(number, number + 5)], 1.0) for number in range(0, 40, 5)]
    lines = written(*prompts, put(range(40), 2.0))
    forgotten = [number for line in lines if line["type"] == "put" for number in line["hash_ids"]]
    assert forgotten == [*range(30)]


def test_requests_without_chain_fields_or_a_declared_size_are_counted_and_left_out():
    lines = Lines()
    lines.take([lookup([1], chain=[]), lookup([1], block_bytes=0), put([1])])
    assert (lines.num_without_place, len([*lines.rest()])) == (2, 1)


def test_a_namespace_has_its_number_by_its_first_line():
    silent = lookup([1], chain=[], namespace="silent")
    read = request("get", [1], 0.0, namespace="read")
    (line,) = written(silent, read, lookup([1], namespace="third"))
    assert line["namespace"] == 0


def test_counts_are_of_lookups_in_tokens():
    lines = Lines()
    wide = [Stretch(2, 0, 0, 64)]
    written(lookup([1, 2], found=1), lookup([3, 4], found=2, chain=wide), put([5]), lines=lines)
    assert (lines.num_lines, lines.num_lookups) == (3, 2)
    assert (lines.tokens, lines.found_tokens) == (2 * 16 + 2 * 64, 16 + 2 * 64)


def ids_of(lines: Lines, *requests: RecordedRequest) -> list[int]:
    lines.take(requests)
    return [*joined.from_iterable(json.loads(line)["hash_ids"] for line in lines.rest())]


def test_ids_are_of_this_recording_and_of_their_namespace():
    asked = lookup(range(500))
    first, second = (ids_of(Lines(), asked) for _ in range(2))
    assert len({*first}) == 500 and not {*first} & {*second}
    lines = Lines()
    here, there = (
        ids_of(lines, lookup(range(500), at_s, namespace=name))
        for name, at_s in (("a", 0.0), ("b", 9.0))
    )
    assert not {*here} & {*there}
    assert all(0 <= one < 1 << ID_BITS for one in here)


def test_an_id_is_a_keyed_hash_of_64_random_bytes(monkeypatch):
    """Without them an id would show which of some prompts it is of."""
    asked: list[int] = []
    real = secrets.token_bytes

    def token_bytes(size: int) -> bytes:
        asked.append(size)
        return bytes(range(size))

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    (one,) = ids_of(Lines(), lookup([1]))
    assert asked == [64]
    hashed = hashlib.blake2b(b"0 " + key(1), key=bytes(range(64)), digest_size=8).digest()
    assert one == int.from_bytes(hashed) >> 64 - ID_BITS
    monkeypatch.setattr(secrets, "token_bytes", real)
    assert ids_of(Lines(), lookup([1])) != [one]


def test_wrong_keys_of_a_server_are_an_error_of_its_protocol():
    wrong = RecordedRequest("lookup", 0.0, "n", 1, b"abc", 2, [Stretch(1, 0, 0, 16)], b"\0")
    with pytest.raises(RemoteProtocolError):
        Lines().take([wrong])


@pytest.mark.parametrize(
    "fields",
    [
        {"at_s": math.nan}, {"at_s": math.inf}, {"at_s": 1e308}, {"at_s": -1.0}, {"kind": "x"},
        {"keys": b""}, {"states": b""}, {"states": bytes(3)}, {"chain": [Stretch(3, 0, 0, 16)]},
        {"chain": [Stretch(2, 0, 0, 16), Stretch(1, 0, 99, 16)]}, {"chain": [Stretch(2, 0, 0, 0)]},
        {"chain": [Stretch(2, 0, 0, 16, backwards=True)]},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_that_no_server_remembers_is_an_error_of_its_protocol(fields):
    lines = Lines()
    lines.take([lookup([1, 2])])
    with pytest.raises(RemoteProtocolError):
        lines.take([msgspec.structs.replace(lookup([3, 4]), **fields)])
    assert len([*lines.rest()]) == 1, "what came before is written"


def test_lines_are_due_as_well_when_too_many_wait(monkeypatch):
    monkeypatch.setattr(record_lines, "MOST_WAITING", 10)
    lines = Lines()
    lines.take(lookup([number]) for number in range(50))
    assert len([*lines.due(math.nan)]) == 40
