"""A router receives of the servers' blocks what this engine has learned of them."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import scripted_client
from scripted_client import Asked
from tiered_engine import TieredEngine, key_of
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from kv_connector.vllm.server_events import ServerEvents
from remote_server.client import GetOutcome, GetResult
from remote_server.errors import ConfigError
from remote_server.protocol import KeyState

ABSENT, PENDING, READABLE = KeyState


class Router:
    """Follows the events as a router does."""

    def __init__(self) -> None:
        self.believes: set[OffloadKey] = set()

    def follow(self, events: Any) -> list[OffloadingEvent]:
        taken = list(events)
        for event in taken:
            assert (event.medium, event.locality) == (Medium.STORAGE, Locality.REMOTE)
            assert event.ownership == "kvferry"
            if event.removed:
                assert self.believes.issuperset(event.keys), "removed what was never there"
                self.believes -= set(event.keys)
            else:
                assert self.believes.isdisjoint(event.keys), "announced twice"
                self.believes |= set(event.keys)
        return taken


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> TieredEngine:
    publishes_events(monkeypatch, True)
    return TieredEngine(kv_events=True)


def publishes_events(monkeypatch: pytest.MonkeyPatch, published: bool) -> None:
    made = scripted_client.spec_of_tier

    def spec(*args: Any, **kwargs: Any) -> Any:
        spec = made(*args, **kwargs)
        spec.kv_events_config = SimpleNamespace(enable_kv_cache_events=published)
        return spec

    monkeypatch.setattr("tiered_engine.spec_of_tier", spec)


def keys(*numbers: int) -> set[OffloadKey]:
    return {key_of(number) for number in numbers}


def put(engine: TieredEngine, name: str, numbers: range) -> None:
    engine.compute(name, numbers)
    while engine.client.reply_to_all(ABSENT):
        engine.step()
    engine.step()


def ask(engine: TieredEngine, name: str, numbers: range) -> Asked:
    """A request looks these up; the query."""
    context, wanted = engine.request(name, numbers)
    engine.lookup(context, wanted)
    engine.step()
    return engine.client.last("lookup")


def test_a_block_is_announced_when_the_server_has_answered_its_put(engine, router):
    engine.compute("a", range(3))
    engine.step()
    assert not router.follow(engine.tier.take_events()), "the server has not answered"
    put(engine, "b", range(3, 5))
    assert router.follow(engine.tier.take_events())
    assert router.believes == keys(0, 1, 2, 3, 4)
    assert not router.follow(engine.tier.take_events()), "each event is taken once"


def test_a_block_that_a_lookup_finds_absent_is_removed(engine, router):
    put(engine, "a", range(4))
    router.follow(engine.tier.take_events())
    engine.primary._policy.clear()
    asked = ask(engine, "b", range(4))
    asked.found(READABLE, READABLE, ABSENT, PENDING)
    engine.tier.lookups._queries.take_answers()
    router.follow(engine.tier.take_events())
    assert router.believes == keys(0, 1, 3), "one that is being written is not gone"


def test_a_load_announces_what_landed_and_removes_what_was_gone():
    events, router = ServerEvents(), Router()
    events.held(keys(0, 1, 2))
    events.gone(keys(2, 7))
    events.held(keys(0, 5))
    router.follow(events.take())
    assert router.believes == keys(0, 1, 5)


def test_a_load_that_is_late_removes_nothing(engine, router):
    put(engine, "a", range(2))
    router.follow(engine.tier.take_events())
    engine.primary._policy.clear()
    context, wanted = engine.request("b", range(2))
    engine.lookup(context, wanted)
    engine.step()
    engine.client.last("lookup").found(READABLE, READABLE)
    engine.lookup(context, wanted)
    engine.step()
    got = engine.client.last("get")
    got.reply.set_result(GetResult([], [GetOutcome.LATE, GetOutcome.MISS], bytes=0))
    engine.step()
    router.follow(engine.tier.take_events())
    assert router.believes == keys(0)


def test_a_server_that_restarts_has_nothing_until_it_is_found_again(engine, router):
    put(engine, "a", range(3))
    router.follow(engine.tier.take_events())
    engine.client.epoch = "boot-2"
    engine.step()
    router.follow(engine.tier.take_events())
    assert not router.believes


def test_of_several_servers_only_what_the_lost_one_held_is_removed(router):
    events = ServerEvents()
    events.held([key_of(1), key_of(2)], {key_of(1): "one", key_of(2): "two"})
    events.server_lost("one")
    router.follow(events.take())
    assert router.believes == keys(2)


def test_another_weight_epoch_removes_all(engine, router):
    put(engine, "a", range(3))
    router.follow(engine.tier.take_events())
    engine.tier.drain_jobs()
    router.follow(engine.tier.take_events())
    assert not router.believes


def test_of_too_many_blocks_the_oldest_are_removed(router):
    """A router counts a block too few rather than one too many."""
    events = ServerEvents(most_keys=3)
    events.held([key_of(n) for n in range(5)])
    events.held([key_of(2), key_of(9)])
    router.follow(events.take())
    assert router.believes == keys(2, 4, 9)


def test_a_router_that_follows_every_event_knows_what_the_engine_knows(router):
    random, events, truth = Random(1), ServerEvents(most_keys=50), dict[OffloadKey, str]()
    for _ in range(10_000):
        some = [key_of(random.randrange(100)) for _ in range(random.randrange(6))]
        match random.randrange(20):
            case 0:
                lost = random.choice(["one", "two"])
                events.server_lost(lost)
                truth = {key: holder for key, holder in truth.items() if holder != lost}
            case 1:
                events.forget()
                truth.clear()
            case 2 | 3 | 4 | 5:
                events.gone(some)
                truth = {key: holder for key, holder in truth.items() if key not in some}
            case 6 | 7 | 8:
                router.follow(events.take())
                assert router.believes == truth.keys()
            case _:
                holders = {key: random.choice(["one", "two"]) for key in some}
                events.held(some, holders)
                for key in some:
                    truth.pop(key, None)
                    truth[key] = holders[key]
                truth = dict(list(truth.items())[-50:])
    router.follow(events.take())
    assert router.believes == truth.keys()


def test_without_the_setting_there_are_no_events():
    engine = TieredEngine()
    put(engine, "a", range(3))
    assert list(engine.tier.take_events()) == []


def test_the_setting_is_refused_where_vllm_publishes_nothing(monkeypatch: pytest.MonkeyPatch):
    publishes_events(monkeypatch, False)
    with pytest.raises(ConfigError, match=r"kv_events: .* add --kv-events-config"):
        TieredEngine(kv_events=True)
