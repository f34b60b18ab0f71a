"""Keys that the server makes from tokens are those that vLLM makes."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import make_offload_key

from remote_server.prompt_keys import VLLMS_OWN, Recipe, recipe_of, recipe_text


def vllms_hashes(algorithm: str, tokens: list[int], size: int) -> list[bytes]:
    make: Callable[[Any], bytes] = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(make)
    parent, hashes = None, []
    for end in range(size, len(tokens) + 1, size):
        parent = kv_cache_utils.hash_block_tokens(make, parent, tokens[end - size : end])
        hashes.append(bytes(parent))
    return hashes


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
@pytest.mark.parametrize("seed", [None, "0", "a long seed " * 30])
def test_hashes_are_vllms(algorithm: str, seed: str | None, monkeypatch: pytest.MonkeyPatch):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    random = Random(7)
    tokens = [random.choice([0, 23, 24, 255, 256, 65535, 65536, 1 << 20]) for _ in range(100)]
    tokens += [random.randrange(1 << 33) for _ in range(333)]
    declared = {
        "hash_algo": algorithm,
        "hash_seed": seed or VLLMS_OWN,
        "key_tokens": recipe_text(16, {0: 16}),
    }
    recipe = recipe_of(declared)
    assert recipe is not None
    hashes = vllms_hashes(algorithm, tokens, 16)
    assert recipe.hashes(tokens) == hashes and len(hashes) == 433 // 16
    (group,) = recipe.keys(hashes)
    assert group.keys == [make_offload_key(each, 0) for each in hashes]


def test_keys_of_rows_and_groups_end_with_their_last_hash():
    recipe = Recipe("sha256", "s", 16, ((0, 64), (3, 32)))
    hashes = [bytes([number]) * 32 for number in range(7)]
    of_rows, of_group = recipe.keys(hashes)
    assert of_rows == (64, [make_offload_key(hashes[3], 0)])
    assert of_group == (32, [make_offload_key(hashes[n], 3) for n in (1, 3, 5)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash_algo": "xxhash"},
        {"hash_algo": ""},
        {"key_tokens": ""},
        {"key_tokens": "16"},
        {"key_tokens": "0 0:16"},
        {"key_tokens": "16 0:24"},
        {"key_tokens": "16 0:0"},
        {"key_tokens": "16 -1:16"},
        {"key_tokens": "16 0:16:16"},
        {"key_tokens": f"16 {1 << 32}:16"},
        {"key_tokens": "16 " + " ".join(f"{n}:16" for n in range(65))},
    ],
)
def test_what_a_client_declares_wrongly_is_no_recipe(wrong: dict[str, str]):
    declared = {"hash_algo": "sha256", "hash_seed": "0", "key_tokens": "16 0:16"}
    assert recipe_of(declared) is not None
    assert recipe_of(declared | wrong) is None
