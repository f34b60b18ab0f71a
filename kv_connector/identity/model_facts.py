"""Facts of a model: its weights, its config, its code, and the files of its processor."""

import copy
import hashlib
import inspect
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_connector.identity.fact_text import NotKnown, digest_of, text_of
from kv_connector.identity.file_digests import digest_of_files

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

# Formats of vLLM's default loader: equal files give equal values. "npcache" is missing: it reads a
# converted copy, which may be older than the files.
_DEFAULT_FORMATS = frozenset(
    ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt")
)

# Formats that read all safetensors files of a folder, or those of one rank each.
_FOLDER_FORMATS = frozenset(("runai_streamer", "runai_streamer_sharded", "sharded_state"))


def loader_of(load: "LoadConfig") -> str:
    """The loader of the weights; all formats of the default loader count as one."""
    name = str(load.load_format)
    return "default" if name in _DEFAULT_FORMATS else name


def weights_of(model: "ModelConfig", load: "LoadConfig") -> str:
    """A digest of the weights; a random value for random weights. Raises `NotKnown`, and `OSError`
    for a file that cannot be read."""
    if load.load_format == "dummy":
        # Some are seeded and some are uninitialized memory, so the next start of this engine has
        # others.
        return f"random {secrets.token_hex(8)}"
    return digest_of_files(_files(model, load))


def model_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """The folder of a model's files on this host: `model` itself, or its snapshot in the hub's
    cache. Uses no network. Raises `NotKnown`.
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
    except Exception as error:  # the hub raises types of its own, and ValueError for a bad name
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
    raise NotKnown(f"--load-format {load.load_format}: its weights cannot be identified")


def _files_of_default_loader(folder: Path, load: "LoadConfig", *, from_hub: bool) -> list[Path]:
    if not from_hub or load.load_format != "auto":
        return _asked(folder, load)
    # For a model of the hub the loader lists the remote files, or offline none, and chooses
    # between two formats by them. Here both are taken, as far as they were downloaded.
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
    """The files that vLLM's loader reads from a folder."""
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


# Entries of a model's config that record its origin and do not affect what it computes.
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "architectures_source")

# Entries that `rope_of` takes as a separate fact.
_ROPE_ENTRIES = ("rope_parameters", "rope_scaling", "rope_theta")

# Kinds of RoPE whose angle for a position does not depend on the number of positions.
LENGTH_FREE_ROPE = frozenset(
    ("default", "linear", "llama3", "yarn", "deepseek_yarn", "proportional")
)

# Models of vLLM that do not read `max_model_len`, and read `max_position_embeddings` only for the
# size of their RoPE table. Llama 4, in contrast, scales its queries when max_model_len is large.
LENGTH_FREE_MODELS = frozenset(
    (
        *("gemma", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "llama"),
        *("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    )
)

# Files that configure the image, video and audio processors of a multimodal model.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

# Files from which vLLM reads quantization and sparse attention when the config has neither.
_WEIGHT_SETTINGS = ("*quant*.json", "sparse_attention_config.json")

# Attributes by which a model class names weights besides the loader's own files.
_MORE_WEIGHTS = re.compile(r"\b(secondary_weights|allow_patterns_overrides)\b")


def config_of(model: "ModelConfig") -> str:
    """A digest of the whole config: that of a multimodal model with its towers."""
    whole = _entries(model.hf_config)
    if model.hf_text_config is model.hf_config:
        for name in _ROPE_ENTRIES:
            whole.pop(name, None)
    if length_is_free(model):
        whole.pop("max_position_embeddings", None)
    return digest_of(whole)


def rope_of(model: "ModelConfig") -> str:
    """The encoding of positions: a separate fact, because it is often overridden."""
    text = _entries(model.hf_text_config)
    found = {name: text[name] for name in _ROPE_ENTRIES if text.get(name) is not None}
    return text_of(found) if found else ""


def length_of(model: "ModelConfig") -> str:
    """`max_model_len` if KV values may depend on it, else empty."""
    return "" if length_is_free(model) else str(model.max_model_len)


def length_is_free(model: "ModelConfig") -> bool:
    """Whether KV values are known not to depend on the engine's longest sequence.

    Dynamic NTK and LongRoPE choose their factors by it, and some models read it themselves.
    """
    text = _entries(model.hf_text_config)
    if model.hf_text_config is not model.hf_config or "dual_chunk_attention_config" in text:
        return False
    kinds = {kind for name in _ROPE_ENTRIES for kind in _rope_kinds(text.get(name))}
    return text.get("model_type") in LENGTH_FREE_MODELS and kinds <= LENGTH_FREE_ROPE


def model_class_of(model: "ModelConfig") -> str:
    """The model class, with a digest of its code if it is not vLLM's own.

    Raises `NotKnown` for a class that reads weights from outside its model's folder.
    """
    entry: Any = model.registry.models.get(model.architecture)
    if entry is None:
        raise NotKnown(f"vLLM has no model class for {model.architecture}")
    if hasattr(entry, "model_cls"):
        module, name = entry.model_cls.__module__, entry.model_cls.__qualname__
        source = inspect.getsourcefile(entry.model_cls)
    else:
        module, name = entry.module_name, entry.class_name
        spec = find_spec(module)
        source = spec.origin if spec is not None else None
    if source is None:
        raise NotKnown(f"the code of {module}:{name} cannot be found")
    code = Path(source).read_bytes()
    if _MORE_WEIGHTS.search(code.decode(errors="replace")):
        raise NotKnown(f"{module}:{name} reads weights from outside its model's folder")
    ours = module.startswith("vllm.")
    return f"{module}:{name}" + ("" if ours else f" {hashlib.sha256(code).hexdigest()[:16]}")


def weight_settings_of(model: "ModelConfig", load: "LoadConfig") -> str:
    """A digest of the files that configure quantization and sparsity; empty without any."""
    named = _entries(model.hf_config).get("quantization_config_file")
    more = [Path(named)] if isinstance(named, str) else []
    return _digest_of_small_files(model, load.download_dir, _WEIGHT_SETTINGS, more)


def remote_code_of(model: "ModelConfig", load: "LoadConfig") -> str:
    """A digest of the code in the model's folder, if it may be run; else empty."""
    if not model.trust_remote_code:
        return ""
    return _digest_of_small_files(model, load.download_dir, ("**/*.py",))


def processor_of(model: "ModelConfig", load: "LoadConfig") -> str:
    """A digest of a multimodal model's input processing; empty for other models."""
    if model.multimodal_config is None:
        return ""
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    files = _digest_of_small_files(model, load.download_dir, PROCESSOR_FILES)
    scales = model.multimodal_config.mm_encoder_fp8_scale_path
    content = Path(scales).read_text() if scales else ""
    return digest_of([version, files, model.hf_image_processor_config, content])


def _entries(config: Any) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in _CONFIG_NOISE}


def _rope_kinds(rope: Any) -> Iterable[str]:
    """The kind of each set of RoPE parameters; some models have a set per kind of layer."""
    if not isinstance(rope, Mapping):
        return
    kind = rope.get("rope_type") or rope.get("type")
    nested = [part for part in rope.values() if isinstance(part, Mapping)]
    if kind is not None or not nested:
        yield str(kind or "default")
    for part in nested:
        yield from _rope_kinds(part)


def _digest_of_small_files(
    model: "ModelConfig", cache: str | None, patterns: Iterable[str], more: Iterable[Path] = ()
) -> str:
    """A digest of the content of `more` and of the files in the model's folder that match
    `patterns`; empty without any."""
    folders = {model_folder(model.model, model.revision, cache)}
    if cache is not None:
        # transformers loads configs and code, and does not use vLLM's download_dir.
        with suppress(NotKnown):
            folders.add(model_folder(model.model, model.revision, None))
    paths = {path for folder in folders for pattern in patterns for path in folder.glob(pattern)}
    lines = {
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in (*paths, *more)
        if path.is_file()
    }
    return digest_of(lines) if lines else ""
