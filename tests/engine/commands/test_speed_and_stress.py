"""The levels that the examples name are those that a real engine's tokens came from."""

import json
import re
from pathlib import Path

import pytest
from cluster import BLOCK, Cluster, Engine

from examples import stress_test
from examples.endpoint import Endpoint
from examples.make_dummy_inputs import make_dummy_inputs
from examples.target import Target
from examples.token_sources import COMPUTED, ENGINE, MEMORY, POOL, TokenSources

LENGTH = 20 * BLOCK
QUESTION = 13


def test_a_prompt_is_told_from_level_to_level(engine: Engine, cluster: Cluster):
    endpoint = Endpoint(engine.url)
    target = Target(endpoint, endpoint.model(), TokenSources(endpoint, cluster.client))
    (prompt,) = make_dummy_inputs(1, LENGTH, seed=5)
    found = {}
    found[COMPUTED] = target.ask(prompt)
    found[ENGINE] = target.ask(prompt)
    engine.forget()
    found[POOL] = target.ask(prompt)
    engine.leave_to_server()
    found[MEMORY] = target.ask(prompt)
    for level, (answer, tokens) in found.items():
        expected = {COMPUTED: QUESTION, level: LENGTH}
        assert tokens == ({COMPUTED: LENGTH + QUESTION} if level == COMPUTED else expected)
        assert answer.prompt_tokens == LENGTH + QUESTION
        assert answer.cached_tokens == (0 if level == COMPUTED else LENGTH)
        assert answer.seconds > 0


def test_the_triangle_of_a_running_engine(
    engine: Engine, cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = tmp_path / "record.json"
    flags = ["--url", engine.url, "--cache-server", cluster.server.endpoint, "--pause", "0"]
    flags += ["--n", "2", "--length", str(LENGTH), "--seed", "6", "--json", str(record)]
    assert stress_test.main(flags) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +1 +[\d.]+ c\n +2 +[\d.]+ e +[\d.]+ c$", printed, re.MULTILINE)
    figures = json.loads(record.read_text())["figures"]
    assert [{**figure["values"], "seconds": 0} for figure in figures] == [
        {"seconds": 0, COMPUTED: LENGTH + QUESTION},
        {"seconds": 0, COMPUTED: QUESTION, ENGINE: LENGTH},
        {"seconds": 0, COMPUTED: LENGTH + QUESTION},
    ]
