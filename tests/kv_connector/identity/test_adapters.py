"""A LoRA adapter that is replaced is not served from the pool with the KV of the one before."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modelless_engine import Make, ModellessEngine
from modelless_runner import TOKENS, right
from vllm.lora.request import LoRARequest

from kv_connector.identity import adapters
from kv_connector.identity.adapters import Adapters, AdapterState

SAME, CHANGED, UNKNOWN = AdapterState.SAME, AdapterState.CHANGED, AdapterState.UNKNOWN

PROMPT = list(range(1, 4 * TOKENS + 2))


def write(folder: Path, content: str) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(content)
    return LoRARequest("mine", 1, str(folder))


# ── in the engine ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def engine(make: Make) -> Iterator[ModellessEngine]:
    engine = make()
    yield engine
    assert not engine.hook_errors()


def answered(engine: ModellessEngine, name: str, lora: LoRARequest) -> list[int | None]:
    """What lay in the blocks that a request ran on, which found none in the engine's cache."""
    assert engine.scheduler.reset_prefix_cache()
    request = engine.add(name, PROMPT, lora=lora)
    engine.start(name)
    used = [engine.block(request, i) for i in range(4)]
    engine.finish(name)
    return used


def test_an_adapter_is_served_from_the_pool_until_it_is_replaced_in_place(
    engine: ModellessEngine, tmp_path: Path
):
    lora = write(tmp_path / "lora", "one")
    answered(engine, "one", lora)
    engine.runner.weights = 2  # what is computed now differs from what was stored
    assert answered(engine, "one again", lora) == right(1, PROMPT)
    write(tmp_path / "lora", "two")
    assert answered(engine, "two", lora) == right(2, PROMPT)
    engine.runner.weights = 3
    assert answered(engine, "three", lora) == right(3, PROMPT), "and two left nothing there"
    assert engine.totals()["kvferry_kept_back_requests", "lora_changed"] == 2


def test_an_adapter_that_is_replaced_while_a_request_waits_is_computed(
    engine: ModellessEngine, tmp_path: Path
):
    """It was the same when the request came, and is another when the engine gets to it."""
    lora = write(tmp_path / "lora", "one")
    answered(engine, "one", lora)
    assert engine.scheduler.reset_prefix_cache()
    two = engine.add("two", PROMPT, lora=lora)
    write(tmp_path / "lora", "two")
    engine.runner.weights = 2
    engine.start("two")
    assert [engine.block(two, i) for i in range(4)] == right(2, PROMPT)


# ── what counts as a change ──────────────────────────────────────────────────────────────────


def through_another_file(folder: Path) -> None:
    """As `safetensors` and rsync write: a new file takes the name."""
    (folder / "new").write_text("two")
    os.utime(folder / "new", ns=(0, 0))
    os.replace(folder / "new", folder / "adapter_model.safetensors")


def with_the_old_time(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    times = path.stat()
    path.write_text("two")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def by_another_folder(folder: Path) -> None:
    """The path is a link, to a folder for each version."""
    write(folder.parent / "v2", "one")
    (folder.parent / "link").unlink()
    (folder.parent / "link").symlink_to("v2")


@pytest.mark.parametrize(
    "change",
    [
        through_another_file,
        with_the_old_time,
        by_another_folder,
        lambda folder: (folder / "adapter_config.json").write_text('{"r": 99}'),
        lambda folder: (folder / "adapter_model.bin").write_text("one more"),
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
    ],
)
def test_every_way_to_replace_an_adapter_is_seen_and_counts_for_good(change: Any, tmp_path: Path):
    folder = tmp_path / "v1"
    write(folder, "one")
    (tmp_path / "link").symlink_to("v1")
    lora, known = LoRARequest("mine", 1, str(tmp_path / "link")), Adapters()
    assert [known.check(lora) for _ in range(2)] == [SAME, SAME]
    (folder / "README.md").write_text("what training left behind")
    assert known.check(lora) is SAME
    change(folder)
    assert [known.check(lora) for _ in range(2)] == [CHANGED, CHANGED]
    write(folder, "one")
    assert known.check(lora) is CHANGED, "the engine may hold either"


def test_an_adapter_is_known_by_name_and_path_as_keys_are(tmp_path: Path):
    known = Adapters()
    lora = write(tmp_path / "lora", "one")
    known.check(lora)
    write(tmp_path / "lora", "two")
    assert known.check(LoRARequest("another", 1, lora.lora_path)) is SAME
    assert known.check(lora) is CHANGED


@pytest.mark.parametrize("path", ["/nowhere", "nobody/nothing", "s3://bucket/lora", "empty"])
def test_an_adapter_that_cannot_be_seen_keeps_away(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    known = Adapters()
    assert known.check(LoRARequest("mine", 1, path)) is UNKNOWN
    assert known.check(LoRARequest("mine", 1, path)) is not SAME


def test_an_adapter_that_comes_back_after_it_could_not_be_seen_may_be_another(tmp_path: Path):
    lora, known = write(tmp_path / "lora", "one"), Adapters()
    known.check(lora)
    (tmp_path / "lora").rename(tmp_path / "away")
    assert known.check(lora) is UNKNOWN
    (tmp_path / "away").rename(tmp_path / "lora")
    assert known.check(lora) is CHANGED


def test_adapters_beyond_the_limit_keep_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapters, "MOST_ADAPTERS", 1)
    known, first = Adapters(), write(tmp_path / "lora", "one")
    second = LoRARequest("second", 2, first.lora_path)
    assert [known.check(one) for one in (first, second, first)] == [SAME, UNKNOWN, SAME]
