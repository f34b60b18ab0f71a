"""Two checkpoints are one model when all that the loader takes from them is equal."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import (
    _LOAD_FORMAT_TO_MODEL_LOADER,
    BaseModelLoader,
    register_model_loader,
)

from kv_connector.identity.fact_text import NotKnown
from kv_connector.identity.file_digests import digest_of_files
from kv_connector.identity.model_facts import loader_of, weights_of

MATRICES = 12


def identity(folder: Path | str, load_format: str = "auto", **settings: Any) -> str:
    model: Any = SimpleNamespace(model=str(folder), revision=None, model_weights="")
    return weights_of(model, LoadConfig(load_format=load_format, **settings))


def tensors(seed: int = 0) -> dict[str, Any]:
    """Large ones, of which windows are read, and small ones, which are read whole."""
    values = np.random.default_rng(seed)
    large = {f"layers.{i}.weight": values.random((64, 256), np.float32) for i in range(MATRICES)}
    return large | {f"layers.{i}.norm": values.random(64, np.float32) for i in range(MATRICES)}


def checkpoint(folder: Path, content: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    save_file(content or tensors(), folder / "model.safetensors")
    return folder


def test_equal_models_under_two_names_are_one(tmp_path: Path):
    assert identity(checkpoint(tmp_path / "one")) == identity(checkpoint(tmp_path / "another"))


def test_any_one_tensor_that_differs_makes_another_model(tmp_path: Path):
    known = {identity(checkpoint(tmp_path / "base"))}
    other = tensors(seed=1)
    for name in other:
        changed = checkpoint(tmp_path / name, tensors() | {name: other[name]})
        known.add(identity(changed))
    assert len(known) == 1 + len(other)


def test_names_dtypes_and_shapes_are_part_of_the_model(tmp_path: Path):
    same = np.zeros(4096, np.float32)
    different = [{"a": same}, {"b": same}, {"a": same.reshape(64, 64)}, {"a": same.view(np.int32)}]
    folders = [checkpoint(tmp_path / str(i), content) for i, content in enumerate(different)]
    assert len(set(map(identity, folders))) == len(different)


STRAY: dict[str, Callable[[Path], Any]] = {
    "a file that is in no index": lambda folder: save_file(tensors(7), folder / "x.safetensors"),
    "the original weights": lambda folder: checkpoint(folder / "original"),
    "an older format": lambda folder: torch.save({}, folder / "pytorch_model.bin"),
    "the optimizer": lambda folder: torch.save({}, folder / "optimizer.pt"),
    "a note": lambda folder: (folder / "README.md").write_text("hello"),
}


def indexed(folder: Path) -> Path:
    checkpoint(folder)
    weight_map = dict.fromkeys(tensors(), "model.safetensors")
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


@pytest.mark.parametrize("stray", STRAY)
def test_a_file_that_the_loader_leaves_alone_changes_nothing(stray: str, tmp_path: Path):
    known = identity(indexed(tmp_path / "clean"))
    folder = indexed(tmp_path / "with more")
    STRAY[stray](folder)
    assert identity(folder) == known


def test_the_official_format_of_mistral_is_preferred_as_the_loader_does(tmp_path: Path):
    known = identity(checkpoint(tmp_path / "one"))
    both = checkpoint(tmp_path / "both")
    save_file(tensors(3), both / "consolidated.safetensors")
    assert identity(both) != known
    assert identity(both, "mistral") == identity(both)


def as_zip(content: dict[str, Any], path: Path) -> None:
    torch.save(content, path)


def as_zip_without_checksums(content: dict[str, Any], path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(content, path)
    finally:
        torch.serialization.set_crc32_options(True)


def as_pickle(content: dict[str, Any], path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [as_zip, as_zip_without_checksums, as_pickle])
def test_a_tensor_that_differs_in_an_older_format_makes_another_model(
    save: Callable[[dict[str, Any], Path], None], tmp_path: Path
):
    def saved(name: str, change: int | None) -> str:
        content = {f"w{i}": torch.zeros(50_000) for i in range(4)}
        if change is not None:
            content[f"w{change}"] += 1
        (tmp_path / name).mkdir()
        save(content, tmp_path / name / "pytorch_model.bin")
        return identity(tmp_path / name)

    base = saved("base", None)
    assert identity(shutil.copytree(tmp_path / "base", tmp_path / "copy")) == base
    assert len({base, *(saved(str(i), i) for i in range(4))}) == 5


def test_one_byte_is_enough_where_the_container_has_checksums(tmp_path: Path):
    def saved(name: str, at: int) -> str:
        content = torch.zeros(4_000_000, dtype=torch.uint8)
        content[at] = 1
        (tmp_path / name).mkdir()
        torch.save({"w": content}, tmp_path / name / "pytorch_model.bin")
        return identity(tmp_path / name)

    assert len({saved(str(at), at) for at in random.Random(0).sample(range(4_000_000), 5)}) == 5


def hub_cache(root: Path, blob: str) -> Path:
    """A snapshot of the hub's cache whose weights are under the name `blob`."""
    repository = root / "models--some--model"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    save_file(tensors(), repository / "blobs" / blob)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_a_file_of_the_hubs_cache_is_known_by_its_name_alone(tmp_path: Path):
    """The name is the SHA-256 of the content. It is not read: here it would be equal."""
    one, same, other = (
        digest_of_files([hub_cache(tmp_path / name, blob * 64) / "model.safetensors"])
        for name, blob in [("one", "a"), ("same", "a"), ("other", "b")]
    )
    assert one == same != other


def test_a_link_that_has_no_digest_for_a_name_is_read(tmp_path: Path):
    """A blob of git, a short file, has a SHA-1 for its name; a folder of links has anything."""
    one = hub_cache(tmp_path / "one", "a" * 40) / "model.safetensors"
    other = hub_cache(tmp_path / "other", "b" * 40) / "model.safetensors"
    assert digest_of_files([one]) == digest_of_files([other])


def test_a_model_of_the_hub_is_found_where_it_was_downloaded_to(tmp_path: Path):
    snapshot = hub_cache(tmp_path, "a" * 64)
    assert identity("some/model", download_dir=str(tmp_path)) == identity(snapshot)
    with pytest.raises(NotKnown, match="neither a folder nor in the hub's cache"):
        identity("some/model", download_dir=str(tmp_path / "elsewhere"))


def test_weights_that_cannot_be_seen_are_not_guessed(tmp_path: Path):
    reasons = {
        "object store": ("s3://bucket/model", "auto"),
        "no folder": ("s3://bucket/model", "runai_streamer"),
        "cannot be identified": (checkpoint(tmp_path / "one"), "tensorizer"),
        "Cannot find any model weights": (tmp_path, "auto"),
        "header": (damaged(tmp_path / "damaged"), "auto"),
        "shorter than its header": (truncated(tmp_path / "truncated"), "auto"),
    }
    for reason, (model, load_format) in reasons.items():
        with pytest.raises(NotKnown, match=reason):
            identity(model, load_format)


def damaged(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((10).to_bytes(8, "little") + b"not header")
    return folder


def truncated(folder: Path) -> Path:
    path = checkpoint(folder) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return folder


@pytest.mark.parametrize("load_format", sorted(_LOAD_FORMAT_TO_MODEL_LOADER))
def test_every_format_of_vllm_is_identified_or_kept_out(load_format: str, tmp_path: Path):
    """A format that a later vLLM adds is kept out until it is looked at."""
    known = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor"}
    folder_formats = {"runai_streamer", "runai_streamer_sharded", "sharded_state"}
    folder = checkpoint(tmp_path / "one")
    if load_format in known | folder_formats:
        assert identity(folder, load_format) == identity(folder)
        assert (loader_of(LoadConfig(load_format=load_format)) == "default") == (
            load_format in known
        )
    elif load_format == "dummy":
        assert identity(folder, load_format).startswith("random ")
    else:  # another kind of file, or not identified
        with pytest.raises(NotKnown):
            identity(folder, load_format)


def test_a_loader_that_was_put_in_the_place_of_vllms_is_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Mine(BaseModelLoader):
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

    monkeypatch.setitem(_LOAD_FORMAT_TO_MODEL_LOADER, "auto", _LOAD_FORMAT_TO_MODEL_LOADER["auto"])
    register_model_loader("auto")(Mine)
    with pytest.raises(NotKnown, match="Mine"):
        identity(checkpoint(tmp_path / "one"))


def test_a_single_gguf_file_is_sampled_all_over(tmp_path: Path):
    def written(name: str, at: int) -> str:
        path = tmp_path / name
        content = bytearray(16 << 20)
        content[at : at + (32 << 10)] = b"x" * (32 << 10)
        path.write_bytes(content)
        digest = identity(path, "gguf")
        path.unlink()
        return digest

    places = [0, 5 << 20, 10 << 20, (16 << 20) - (32 << 10)]
    assert len({written("model.gguf", at) for at in places}) == len(places)


def eight_billion(folder: Path) -> Path:
    """A model of 16 GB that takes no room on disk: of Llama 3.1 8B the number of tensors, all of
    one size, and the number of files."""
    folder.mkdir()
    size = 16_000_000_000 // 291
    for shard in range(4):
        tensors = {
            f"layers.{number}": {
                "dtype": "BF16",
                "shape": [size // 2],
                "data_offsets": [place * size, (place + 1) * size],
            }
            for place, number in enumerate(range(shard, 291, 4))
        }
        text = json.dumps(tensors).encode()
        path = folder / f"model-0000{shard + 1}-of-00004.safetensors"
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path, 8 + len(text) + len(tensors) * size)
    return folder


def test_of_a_model_of_eight_billion_parameters_a_small_part_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which takes less than a second of a core."""
    folder = eight_billion(tmp_path / "model")
    assert sum(path.stat().st_size for path in folder.iterdir()) > 15.9e9
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    identity(folder)
    assert 0 < sum(read) < 64 << 20
