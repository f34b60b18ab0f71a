"""The verdict on the answers of an engine can be that one is wrong."""

from types import SimpleNamespace

import pytest
from answers import TIE, Answers


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
