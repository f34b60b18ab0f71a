"""Facts of a model: its weights, its config, its code, and the files of its processor.

Weights are identified by samples of every tensor in their files.
"""

import copy
import hashlib
import inspect
import json
import os
import re
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kv_connector.identity.config_facts import NotKnown, digest_of, text_of

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig


_WINDOW_BYTES = 4 << 10
# A tensor up to this size is read whole: norms, biases, scales.
_SMALL_BYTES = 32 << 10
# A tensor has two windows, and one more for each of these, at most `_MOST_WINDOWS`.
_BYTES_PER_WINDOW = 8 << 20
_MOST_WINDOWS = 16
_PLAIN_WINDOWS = 4096
_HEAD_BYTES = 1 << 20

# safetensors itself refuses a longer header.
_MOST_HEADER_BYTES = 100_000_000

# Reads of one file are sequential, those of several files parallel: a cold disk or a network file
# system serves many at once.
_FILES_AT_ONCE = 8

_SHA256 = re.compile(r"[0-9a-f]{64}")


def digest_of_files(files: Sequence[Path]) -> str:
    """32 hexadecimal digits for the content of `files` and their names without folders.

    Raises `NotKnown` for a file that is not of the format of its name, `OSError` for one that
    cannot be read.
    """
    ordered = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="kvferry-weights") as threads:
        digests = threads.map(_digest_of_file, ordered)
        lines = [f"{path.name} {digest}\n" for path, digest in zip(ordered, digests, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _digest_of_file(path: Path) -> str:
    if (digest := _named_digest(path)) is not None:
        return digest
    size = path.stat().st_size
    sampled = hashlib.sha256(f"{size}\n".encode())
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Without this the kernel reads at least 128 KiB around every window.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for piece in _pieces(path, descriptor, size):
            sampled.update(piece)
    finally:
        os.close(descriptor)
    return sampled.hexdigest()


def _named_digest(path: Path) -> str | None:
    """The SHA-256 in the name of a file of the hub's cache: `snapshots/…/x -> blobs/<SHA-256>`."""
    if not path.is_symlink():
        return None
    blob = path.resolve()
    if blob.parent.name != "blobs" or not _SHA256.fullmatch(blob.name):
        return None
    return f"{blob.stat().st_size} {blob.name}"


def _pieces(path: Path, descriptor: int, size: int) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        return _safetensors(path, descriptor, size)
    if zipfile.is_zipfile(path):
        return _zip(path, descriptor)
    return _plain(descriptor, size)


def _safetensors(path: Path, descriptor: int, size: int) -> Iterator[bytes]:
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < header_bytes <= min(size - 8, _MOST_HEADER_BYTES):
        raise NotKnown(f"{path} has no safetensors header")
    header = os.pread(descriptor, header_bytes, 8)
    yield header
    try:
        entries = [
            (name, *map(int, tensor["data_offsets"]))
            for name, tensor in json.loads(header).items()
            if name != "__metadata__"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NotKnown(f"{path} has a damaged safetensors header") from error
    data = 8 + header_bytes
    for name, begin, end in sorted(entries, key=lambda entry: entry[1]):
        if not 0 <= begin <= end <= size - data:
            raise NotKnown(f"{path} is shorter than its header announces")
        yield from _windows(descriptor, name, data + begin, end - begin)


def _zip(path: Path, descriptor: int) -> Iterator[bytes]:
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        yield f"{member.filename} {member.file_size} {member.CRC}\n".encode()
        # The windows are only for a container written without CRC-32. They include the member's
        # own header, which is harmless.
        yield from _windows(descriptor, member.filename, member.header_offset, member.compress_size)


def _plain(descriptor: int, size: int) -> Iterator[bytes]:
    yield os.pread(descriptor, _HEAD_BYTES, 0)
    yield os.pread(descriptor, _HEAD_BYTES, max(0, size - _HEAD_BYTES))
    yield from _windows(descriptor, "", 0, size, _PLAIN_WINDOWS)


def _windows(
    descriptor: int, name: str, start: int, length: int, count: int | None = None
) -> Iterator[bytes]:
    """Windows of the `length` bytes at `start`: one in each equal part, at a position derived from
    `name`; all of the bytes if they are few."""
    count = count or min(_MOST_WINDOWS, 2 + length // _BYTES_PER_WINDOW)
    if length <= max(_SMALL_BYTES, count * _WINDOW_BYTES):
        yield os.pread(descriptor, length, start)
        return
    part = length // count
    for i in range(count):
        chosen = hashlib.sha256(f"{i} {name}".encode()).digest()
        offset = int.from_bytes(chosen[:8], "little") % (part - _WINDOW_BYTES + 1)
        yield os.pread(descriptor, _WINDOW_BYTES, start + i * part + offset)


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
