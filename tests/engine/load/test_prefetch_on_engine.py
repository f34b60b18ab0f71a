"""A request that is sent ahead brings its prompt from the server into the pool."""

from cluster import BLOCK, Engine

from examples.tiny_model import prompt_tokens

AHEAD = {"kv_transfer_params": {"kvferry": {"prefetch": True}}}
BLOCKS = 20


def test_a_prompt_that_was_prefetched_comes_from_the_pool(engine: Engine):
    prompt = prompt_tokens(BLOCKS * BLOCK + 1, seed=640)
    computed = engine.ask(prompt)
    engine.leave_to_server()
    _, ahead = engine.ask_from(prompt, 1, **AHEAD)
    assert ahead["server"] == BLOCKS * BLOCK
    engine.forget()
    answer, tokens = engine.ask_from(prompt)
    assert answer.agrees_with(computed)
    assert tokens["pool"] == BLOCKS * BLOCK, tokens
    assert tokens["server"] == 0
