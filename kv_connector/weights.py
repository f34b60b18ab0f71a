"""Which weights an engine has loaded: the loader, the files that it takes, their digest.

vLLM's own loader is asked for the files, so that a file which it would not load changes
nothing. Weights whose files cannot be seen from here raise `NotKnown`: the engine then has
nothing to do with the server.
"""

import copy
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_connector.fact_text import NotKnown
from kv_connector.weight_samples import digest_of_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

# Formats of vLLM's default loader. It gives the same values for the same files, however it
# reads them. "npcache" is missing: it reads a converted copy, which may be older than the files.
_DEFAULT_FORMATS = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
)

# Formats that read all safetensors files of a folder, or those of one rank each.
_FOLDER_FORMATS = frozenset(("runai_streamer", "runai_streamer_sharded", "sharded_state"))


def loader_of(load: "LoadConfig") -> str:
    """What turns the files into weights. Two formats of the default loader are one."""
    name = str(load.load_format)
    return "default" if name in _DEFAULT_FORMATS else name


def weights_of(model: "ModelConfig", load: "LoadConfig") -> str:
    """A digest of the weights; a random value where they are random. Raises `NotKnown`, and
    `OSError` for a file that cannot be read."""
    if load.load_format == "dummy":
        # Some of them are seeded and some are whatever memory held, so that not even the next
        # start of this engine has the same.
        return f"random {secrets.token_hex(8)}"
    return digest_of_files(_files(model, load))


def model_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """Where the files of a model are on this host: itself, or its snapshot in the hub's cache.

    Reads no network. Raises `NotKnown`.
    """
    if os.path.isdir(model):
        return Path(model)
    if "://" in model:
        raise NotKnown(f"the files of {model} are in an object store")
    try:
        import huggingface_hub

        found = huggingface_hub.snapshot_download(
            model, revision=revision, cache_dir=cache, local_files_only=True
        )
    except Exception as error:  # the hub raises its own kinds, of which a name is ValueError
        raise NotKnown(f"{model} is neither a folder nor in the hub's cache") from error
    return Path(found)


def _files(model: "ModelConfig", load: "LoadConfig") -> list[Path]:
    if load.load_format in _DEFAULT_FORMATS:
        folder = model_folder(model.model, model.revision, load.download_dir)
        return _files_of_default_loader(folder, load, from_hub=not os.path.isdir(model.model))
    source = model.model_weights or model.model
    if load.load_format in _FOLDER_FORMATS:
        if not os.path.isdir(source):
            raise NotKnown(f"--load-format {load.load_format} reads {source}, which is no folder")
        return _some(Path(source).glob("*.safetensors"), source)
    if load.load_format == "gguf" and os.path.isfile(source):
        return [Path(source)]
    raise NotKnown(f"--load-format {load.load_format}: nothing here can identify its weights")


def _files_of_default_loader(folder: Path, load: "LoadConfig", *, from_hub: bool) -> list[Path]:
    if not from_hub or load.load_format != "auto":
        return _asked(folder, load)
    # For a model of the hub the loader lists the remote files, offline none, and chooses
    # between two formats by that. Both are taken here, as far as they were downloaded.
    found: set[Path] = set()
    for load_format in ("hf", "mistral"):
        one = copy.copy(load)
        one.load_format = load_format
        try:
            found.update(_asked(folder, one))
        except NotKnown:
            continue
    return _some(found, str(folder))


def _asked(folder: Path, load: "LoadConfig") -> list[Path]:
    """The files that vLLM's loader takes from a folder."""
    from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

    loader: Any = get_model_loader(load)
    if type(loader) is not DefaultModelLoader:
        raise NotKnown(f"--load-format {load.load_format} is {type(loader).__qualname__} here")
    try:
        _, files, *_ = loader._prepare_weights(str(folder), None, None, True, None)
    except (RuntimeError, FileNotFoundError) as error:
        raise NotKnown(str(error)) from error
    return _some(map(Path, files), str(folder))


def _some(files: Iterable[Path], folder: str) -> list[Path]:
    found = list(files)
    if not found:
        raise NotKnown(f"no weight file in {folder}")
    return found
