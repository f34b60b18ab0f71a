"""An outage that ends however its test ends, and a scene that a failed test does not spoil."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from answers import TIE, Answers
from chaos_server import eventually, stats_of
from outage import OUTAGES, Books, Scene
from stage import Stage
from weather import Weather

from remote_server.client import ClientConfig, RemoteClient


class Interrupted(BaseException):
    """What strikes anywhere: a time limit of pytest is one."""


class EngineThatFails:
    """Its metrics are read first when the server is away: there the test is interrupted."""

    def forget(self):
        """Nothing is kept."""

    def ask(self, prompt, max_tokens=8, **_):
        return SimpleNamespace(token_ids=[1])

    def metrics(self):
        raise Interrupted


@pytest.fixture
def observer(proxy):
    client = RemoteClient(ClientConfig(proxy.endpoint, client_name="observer"))
    yield client
    client.close()


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_in_whose_middle_something_fails_is_over_when_the_failure_comes_out(
    name, server, proxy, observer, monkeypatch
):
    scene = Scene(EngineThatFails(), server, proxy, seed=1)
    monkeypatch.setattr(scene, "until_ready", lambda: None)
    with pytest.raises(Interrupted):
        scene.suffer(OUTAGES[name], [[1]], [], [], {}, idle_s=0, books=Books())
    assert server.alive() and not server.stopped()
    assert stats_of(observer).server, "it answers through the proxy"


def test_a_stop_that_is_interrupted_before_it_is_seen_is_ended(server, monkeypatch):
    """The signal was sent, and the call that sent it did not return."""

    def interrupted(*_):
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr("chaos_server.eventually", interrupted)
        with pytest.raises(Interrupted):
            server.freeze()
    eventually(server.stopped, "the server has stopped")
    server.thaw()
    assert not server.stopped()


def test_a_server_goes_on_when_the_weather_has_failed_in_the_middle_of_a_stop(
    server, proxy, monkeypatch
):
    def fail(*_):
        server.freeze()
        raise OSError("what follows a stop fails")

    monkeypatch.setattr(Weather, "_trouble_the_server", fail)
    weather = Weather(1, server, [proxy])
    weather.start()
    eventually(lambda: weather.errors, "the weather has failed")
    with pytest.raises(OSError, match="follows a stop"):
        weather.stop()
    assert not server.stopped()


class Prop:
    """A scene that is ready and at rest, or not."""

    def __init__(self):
        self.sound, self.given_back = True, 0

    def give_back(self):
        self.given_back += 1

    def until_ready(self):
        assert self.sound, "the server is not reached"

    def check(self):
        assert self.sound, "a row stays pinned"


def test_a_scene_is_shared_until_a_test_leaves_it_unsound_and_then_it_is_built_anew():
    built, ended = [], []

    @contextmanager
    def build():
        built.append(Prop())
        yield built[-1]
        ended.append(built[-1])

    with Stage(build) as stage:
        first = stage.sound()
        assert stage.sound() is first
        assert first.given_back == 2, "an outage may be left from the last test"
        first.sound = False
        second = stage.sound()
        assert second is not first and ended == [first]
        assert stage.sound() is second
    assert built == ended == [first, second]


class EngineOf:
    """Answers once; whatever is computed afterwards has these probabilities."""

    def __init__(self, answer, **logprobs):
        self._answer, self._logprobs = answer, logprobs
        self.asked = []

    def ask(self, prompt, max_tokens=8, *, logprobs, **extra):
        self.asked.append((prompt, extra))
        found = {f"token_id:{name[1:]}": value for name, value in self._logprobs.items()}
        return SimpleNamespace(token_ids=self._answer, logprobs=[found])


def test_an_answer_may_differ_only_in_tokens_that_are_as_probable():
    engine = EngineOf([5, 6], _6=-1.0, _7=-1.0 - TIE / 2, _8=-1.0 - 2 * TIE)
    answers = Answers(engine)
    answers.learn([1, 2], max_tokens=2)
    answers.check([1, 2], [5, 6])
    assert len(engine.asked) == 1, "what is equal costs nothing"
    answers.check([1, 2], [5, 7])
    prompt, extra = engine.asked[-1]
    assert prompt == [1, 2, 5] and extra["cache_salt"], "the engine's own cache is not believed"
    for wrong in ([5, 8], [5, 9], [5], [5, 6, 6]):
        with pytest.raises(AssertionError):
            answers.check([1, 2], wrong)


def test_all_that_follows_a_token_that_changed_is_compared():
    engine = EngineOf([5, 6, 7], _5=-1.0, _8=-1.0, _9=-9.0)
    answers = Answers(engine)
    answers.learn([1], max_tokens=3)
    answers.check([1], [8, 8, 5])
    with pytest.raises(AssertionError, match="token 2 "):
        answers.check([1], [8, 8, 9])
