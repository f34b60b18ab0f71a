"""What users of the storage workload ask for: sizes by arithmetic, all of it from a seed."""

import itertools
from collections import Counter
from random import Random

import pytest

from benchmarks.storage_workload.traffic.entries import Kind
from benchmarks.storage_workload.traffic.models import MODELS, BlockShape, shape_of
from benchmarks.storage_workload.traffic.personas import PERSONAS, QOS_CLASSES
from benchmarks.storage_workload.traffic.requests import (
    MAX_CONTEXT_TOKENS,
    MAX_TURNS,
    Request,
    Workload,
    retrieve,
)
from remote_server.errors import ConfigError

MODEL = MODELS["llama3.1-8b"]


def first(workload: Workload, users: int, each: int) -> list[Request]:
    return [
        request
        for user in range(users)
        for request in itertools.islice(workload.requests_of(user), each)
    ]


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("tiny-1b", 24_576), ("mistral-7b", 131_072), ("llama2-7b", 524_288),
     ("llama3.1-8b", 131_072), ("llama3.1-70b-instruct", 327_680)],
)  # fmt: skip
def test_a_token_is_a_key_and_a_value_of_every_layer_and_kv_head(name: str, num_bytes: int):
    assert MODELS[name].bytes_per_token == num_bytes


def test_the_last_block_of_an_entry_is_as_long_as_what_is_left():
    assert BlockShape(16, 10).lengths(40) == [160, 160, 80]
    assert BlockShape(16, 10).lengths(32) == [160, 160]
    assert shape_of(MODEL, 16, 0.5).num_bytes == 1 << 20
    with pytest.raises(ConfigError, match="bytes_scale"):
        shape_of(MODEL, 16, 1e-9)


def test_the_same_seed_asks_for_the_same_and_another_for_something_else():
    assert Workload(MODEL, 42).digest(20) == Workload(MODEL, 42).digest(20)
    assert Workload(MODEL, 42).digest(20) != Workload(MODEL, 43).digest(20)
    assert Workload(MODEL, 42).digest(20) != Workload(MODEL, 42, multi_turn=False).digest(20)


def test_sizes_and_pauses_stay_within_what_a_persona_has():
    personas = {persona.name: persona for persona in PERSONAS}
    requests = first(Workload(MODEL, 1), 200, 50)
    for request in requests:
        persona = personas[request.persona]
        assert request.new is not None
        assert persona.context_tokens[0] // 4 <= request.new.tokens <= persona.context_tokens[1]
        low, high = persona.generation_tokens
        assert low // 4 <= request.generation_tokens <= high
        assert persona.think_s[0] * 0.8 <= request.think_s <= persona.think_s[1] * 1.2
    shortest = min(r.new.tokens for r in requests if r.new and r.persona == "document")
    longest = max(r.new.tokens for r in requests if r.new and r.persona == "document")
    assert shortest < 1024 and longest > 7500, "the ranges are used"


def test_classes_and_personas_have_their_shares_of_many_users_and_of_few():
    for users, within in ((10_000, 0.015), (40, 0.05)):
        qos = Counter(request.qos.name for request in first(Workload(MODEL, 42), users, 1))
        for each in QOS_CLASSES:
            assert abs(qos[each.name] / users - each.share) <= within
    personas = Counter(request.persona for request in first(Workload(MODEL, 42), 3000, 1))
    assert all(abs(personas[each.name] / 3000 - 1 / 3) < 0.02 for each in PERSONAS)


def test_a_turn_begins_with_all_that_was_said_before_it_in_its_conversation():
    said: dict[tuple[int, int], tuple[object, ...]] = {}
    continued = 0
    for request in first(Workload(MODEL, 5), 30, 100):
        key = (request.user, request.conversation)
        if key in said:
            assert request.prefix == said[key]
            continued += 1
        else:
            assert request.turn == 1
            assert all(entry.kind is Kind.SYSTEM for entry in request.prefix)
        said[key] = (*request.prefix, request.new)
        assert request.turn <= MAX_TURNS and request.context_tokens <= MAX_CONTEXT_TOKENS
    assert 0.6 < continued / 3000 < 0.85


def test_one_conversation_in_five_begins_with_a_system_prompt():
    begun = first(Workload(MODEL, 2, multi_turn=False), 100, 100)
    with_system = sum(bool(r.prefix) for r in begun)
    assert abs(with_system / len(begun) - 0.2) < 0.02
    assert len({r.prefix for r in begun if r.prefix}) == 3


def test_questions_bring_the_first_chunks_of_a_document_more_often_than_the_last():
    draw, count = Random(0), Counter[int]()
    for _ in range(1000):
        chosen = retrieve(draw, 20)
        assert len(chosen) == len(set(chosen)) == 5
        count.update(chosen)
    assert count[0] > count[2] > count[6] > count[19]
    assert retrieve(Random(0), 2) in ([0, 1], [1, 0])


def test_documents_come_with_one_request_in_ten_and_only_when_asked_for():
    asked = first(Workload(MODEL, 4, num_documents=10), 50, 100)
    assert abs(sum(bool(r.chunks) for r in asked) / len(asked) - 0.1) < 0.02
    assert not any(r.chunks for r in first(Workload(MODEL, 4), 50, 20))
    for document in Workload(MODEL, 4, num_documents=10).documents():
        assert 4_000 <= sum(chunk.tokens for chunk in document) <= 12_000
    large = Workload(MODELS["llama3.1-70b-instruct"], 4, num_documents=10).documents()
    assert all(sum(chunk.tokens for chunk in document) <= 4_096 for document in large)


def test_decoding_reads_the_own_entry_once_for_32_tokens_and_never_for_a_long_prompt():
    request = first(Workload(MODEL, 1), 1, 1)[0]
    assert request.new is not None
    read = {tokens: request._replace(generation_tokens=tokens) for tokens in (1, 32, 33, 100)}
    assert [each.decode_reads for each in read.values()] == [1, 1, 2, 4]
    long = request._replace(new=request.new._replace(tokens=10_000))
    assert (long.decode_reads, long.phase) == (0, "prefill")
