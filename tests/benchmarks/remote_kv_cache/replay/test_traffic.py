"""The shape of made-up traffic: agents, batch jobs, retrieval, and several of them at once."""

import itertools
import random
from collections import Counter

import pytest

from benchmarks.remote_kv_cache.replay.requests import mixtures, traffic
from benchmarks.remote_kv_cache.replay.requests.mixtures import (
    BY_DAY,
    BY_NIGHT,
    MADE,
    MIXTURES,
    phases,
)
from remote_server.traces import Request, check_tree
from remote_server.traces.model_cache import replay
from remote_server.traces.mooncake import TOKENS_PER_BLOCK

SEED = 4
DAY_S = 2000.0


def first(stream, number: int = 2000) -> list[Request]:
    return [*itertools.islice(stream, number)]


@pytest.fixture(scope="module")
def sessions() -> list[Request]:
    return first(traffic.agents(random.Random(SEED), itertools.count(), 0.1))


@pytest.fixture(scope="module")
def days() -> list[list[Request]]:
    """The requests of three days with three jobs each."""
    made = traffic.batch(random.Random(SEED), itertools.count(), 3, DAY_S, 200)
    all_days = itertools.takewhile(lambda one: one.arrival_s < 3 * DAY_S, made)
    grouped = itertools.groupby(all_days, key=lambda one: one.arrival_s // DAY_S)
    return [[*day] for _, day in grouped]


@pytest.fixture(scope="module")
def questions() -> list[Request]:
    return first(traffic.rag(random.Random(SEED), itertools.count(), 3.0))


@pytest.mark.parametrize("name", MIXTURES)
def test_requests_come_in_order_and_a_block_always_follows_the_same_block(name):
    made = MADE[name](100, SEED)[:3000]
    check_tree(made)
    times = [request.arrival_s for request in made]
    assert times == sorted(times) and len(made) == 3000
    assert all(len(request.blocks) == request.input_tokens // TOKENS_PER_BLOCK for request in made)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_seed_gives_the_same_requests_and_another_one_others(name):
    one = MADE[name](100, SEED)
    assert MADE[name](900, SEED) == one
    assert MADE[name](100, SEED + 1) != one


# ── agents ───────────────────────────────────────────────────────────────────────────────


def _came_from(made: list[Request]) -> list[Request | None]:
    """For each request the last one before it whose whole prompt it begins with; None: it only has
    the shared system prompt with the others."""
    by_prompt: dict[tuple[int, ...], Request] = {}
    found = []
    for request in made:
        blocks = request.blocks
        ends = range(len(blocks), traffic.SYSTEM_BLOCKS, -1)
        found.append(
            next((by_prompt[blocks[:end]] for end in ends if blocks[:end] in by_prompt), None)
        )
        by_prompt[blocks] = request
    return found


def test_every_agent_prompt_begins_with_the_shared_system_prompt_of_ten_thousand_tokens(sessions):
    heads = {request.blocks[: traffic.SYSTEM_BLOCKS] for request in sessions}
    assert len(heads) == 1 and len(*heads) == 20


def test_most_agent_prompts_are_a_step_of_a_session_that_went_before(sessions):
    goes_on = sum(before is not None for before in _came_from(sessions))
    assert goes_on > 0.8 * len(sessions)


def test_agents_pause_for_seconds_mostly_and_for_many_minutes_at_times(sessions):
    befores = zip(sessions, _came_from(sessions), strict=True)
    pauses = sorted(one.arrival_s - before.arrival_s for one, before in befores if before)
    assert pauses[len(pauses) // 2] < 60
    assert pauses[-len(pauses) // 20] > 120
    assert 600 < pauses[-1] <= traffic.LONGEST_PAUSE_S


def test_some_sessions_of_agents_go_on_in_two_ways_from_an_earlier_step(sessions):
    kids = Counter(before.blocks for before in _came_from(sessions) if before)
    behind = {before.blocks: set[int]() for before in _came_from(sessions) if before}
    for request, before in zip(sessions, _came_from(sessions), strict=True):
        if before and len(request.blocks) > len(before.blocks):
            behind[before.blocks].add(request.blocks[len(before.blocks)])
    forked = sum(len(ways) > 1 for ways in behind.values())
    assert 0.01 * len(kids) < forked < 0.2 * len(kids)


# ── batch jobs ───────────────────────────────────────────────────────────────────────────


def test_every_prompt_of_a_batch_job_has_the_template_of_its_job_and_an_item_of_its_own(days):
    jobs = {}
    for request in days[0]:
        jobs.setdefault(request.blocks[0], []).append(request.blocks)
    assert len(jobs) == 3
    for prompts in jobs.values():
        uses = Counter(block for prompt in prompts for block in prompt)
        shared = [block for block, number in uses.items() if number > 1]
        low, high = traffic.TEMPLATE_BLOCKS
        assert low <= len(shared) <= high
        assert {uses[block] for block in shared} == {len(prompts)}
        assert all([*prompt[: len(shared)]] == shared for prompt in prompts)
        assert all(len(prompt) > len(shared) for prompt in prompts)


def test_prompts_of_a_batch_day_never_return_on_that_day(days):
    for day in days:
        prompts = [request.blocks for request in day]
        assert len({*prompts}) == len(prompts)


def test_each_batch_job_begins_before_the_one_before_it_has_ended(days):
    for day in days:
        of_job = [request.blocks[0] for request in day]
        begins = sorted((of_job.index(job), job) for job in {*of_job})
        for (_, before), (begin, _) in itertools.pairwise(begins):
            assert before in of_job[begin:]


def test_some_batch_jobs_run_again_the_next_day_with_the_same_prompts_in_the_same_order(days):
    def by_job(day):
        return {
            job: [request.blocks for request in day if request.blocks[0] == job]
            for job in {request.blocks[0] for request in day}
        }

    again = 0
    for day, after in itertools.pairwise(map(by_job, days)):
        for job in day.keys() & after.keys():
            assert day[job] == after[job]
            again += 1
    total = sum(len(by_job(day)) for day in days[1:])
    assert 0 < again < total


# ── retrieval ────────────────────────────────────────────────────────────────────────────


def test_every_question_stands_behind_one_system_prompt_and_two_documents_or_more(questions):
    (head,) = {request.blocks[: traffic.RAG_SYSTEM_BLOCKS] for request in questions}
    assert len(head) == 2
    least = len(head) + 2 * traffic.DOCUMENT_BLOCKS[0] + traffic.QUESTION_BLOCKS[0]
    assert min(len(request.blocks) for request in questions) >= least


def test_every_question_ends_in_a_block_that_no_other_has(questions):
    uses = Counter(block for request in questions for block in request.blocks)
    assert {uses[request.blocks[-1]] for request in questions} == {1}


def test_few_documents_are_asked_for_most(questions):
    """Of the blocks behind the system prompt, which name the first document of a prompt."""
    uses = Counter(request.blocks[traffic.RAG_SYSTEM_BLOCKS] for request in questions)
    hot = sum(number for _, number in uses.most_common(len(uses) // 10))
    assert hot > 0.4 * len(questions)


def test_documents_in_another_order_share_nothing_and_in_the_same_order_all(monkeypatch):
    """With two documents, of which each prompt has both."""
    for name, value in (("DOCUMENTS", 2), ("TAKEN", (2, 2)), ("RELATED", 64)):
        monkeypatch.setattr(traffic, name, value)
    made = first(traffic.rag(random.Random(SEED), itertools.count(), 3.0), 200)
    uses = Counter(block for request in made for block in request.blocks)
    shared = {tuple(block for block in request.blocks if uses[block] > 1) for request in made}
    one, other = shared
    common = {*one} & {*other}
    assert common == {*range(traffic.RAG_SYSTEM_BLOCKS)}
    assert len(one) == len(other) > len(common)


def test_the_popularity_of_documents_drifts():
    made = first(traffic.rag(random.Random(SEED), itertools.count(), 1.0), 8000)

    def hot(part):
        uses = Counter(request.blocks[traffic.RAG_SYSTEM_BLOCKS] for request in part)
        return {block for block, _ in uses.most_common(20)}

    soon = len(hot(made[:2000]) & hot(made[1000:3000]))
    late = len(hot(made[:2000]) & hot(made[6000:]))
    assert late < soon < 20


# ── several kinds ────────────────────────────────────────────────────────────────────────


def test_a_mixture_has_chats_questions_agents_and_two_batch_jobs_at_once():
    made = phases([(*BY_DAY, *BY_NIGHT)], 600.0, SEED)
    heads = Counter(request.blocks[0] for request in made)
    assert len(heads) == 5
    of_kind = [request.blocks[0] for request in made]
    begins = [of_kind.index(head) for head in heads]
    ends = [len(of_kind) - of_kind[::-1].index(head) for head in heads]
    assert max(begins) < min(ends)


@pytest.mark.parametrize("kinds", [[BY_DAY, BY_NIGHT], [BY_NIGHT, BY_DAY]])
def test_in_the_middle_of_a_change_one_traffic_ends_and_another_begins(kinds):
    seconds = 400.0
    made = phases(kinds, seconds, SEED)
    check_tree(made)
    blocks_of = [
        {block for one in made if (one.arrival_s >= seconds) == is_late for block in one.blocks}
        for is_late in (False, True)
    ]
    assert not blocks_of[0] & blocks_of[1]
    assert all(len(blocks) > 1000 for blocks in blocks_of)
    assert seconds < made[-1].arrival_s < 2 * seconds


# ── the floor ────────────────────────────────────────────────────────────────────────────


SMALL = {
    "agents": lambda seed: MADE["agents"](0, seed)[:600],
    "batch": lambda seed: first(
        traffic.batch(random.Random(seed), itertools.count(), 3, mixtures.DAY_S, 150), 1000
    ),
    "rag": lambda seed: MADE["rag"](0, seed)[:1200],
    "mixture": lambda seed: phases([(*BY_DAY, *BY_NIGHT)], 400.0, seed),
    "evening": lambda seed: phases([BY_DAY, BY_NIGHT], 200.0, seed),
    "morning": lambda seed: phases([BY_NIGHT, BY_DAY], 200.0, seed),
}


@pytest.mark.parametrize("name", SMALL)
def test_on_made_up_traffic_what_is_learned_is_never_half_a_point_below_lru(name):
    losses = []
    for seed, capacity in ((1, 200), (2, 800)):
        requests = SMALL[name](seed)
        lru, learned = (replay(requests, capacity, policy) for policy in ("lru", "learned"))
        losses.append(lru.found_percent - learned.found_percent)
    assert max(losses) <= 0.5
    if name == "rag":
        assert max(losses) < -1, "documents that are asked for often stay"
