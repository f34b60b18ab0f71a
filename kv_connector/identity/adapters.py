"""Watch on the files of LoRA adapters.

vLLM's keys identify a LoRA adapter by name and path. An adapter replaced under both keeps its keys,
and vLLM's own cache then serves the old KV. The pool must not: it is larger and lives longer. So
each lookup compares the adapter's files with those of its first use. A changed adapter stays out of
the pool for good: the scheduler cannot see whether the engine loaded the new files before or after
it computed a block.
"""

import hashlib
import os
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.identity.fact_text import NotKnown
from kv_connector.identity.model_facts import model_folder

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.kvferry")

# Prefixes of the files that vLLM reads. Other files, such as the state of a training run, may
# change.
_READ_BY_VLLM = ("adapter_", "new_embeddings")

# About 5 MB. Further adapters do not use the pool.
MOST_ADAPTERS = 16_384


class AdapterState(StrEnum):
    """Whether the pool may be used for an adapter, and the label of the metric if not."""

    SAME = auto()
    CHANGED = "lora_changed"
    UNKNOWN = "lora_unknown"  # the scheduler cannot read its files


class Adapters:
    """Adapters by name and path, as in vLLM's keys. Only the scheduler thread uses it."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], bytes] = {}
        """Identity at the first use; empty once the files changed or could not be read."""

    def check(self, adapter: "LoRARequest") -> AdapterState:
        """Compare the adapter's files with those of its first use. Opens none; raises nothing."""
        key = (adapter.lora_name, adapter.lora_path)
        before = self._files.get(key)
        if before == b"":
            return AdapterState.CHANGED
        try:
            now = _identity(adapter.lora_path)
        except (OSError, NotKnown) as error:
            return self._not_known(key, str(error))
        if before is None:
            if len(self._files) >= MOST_ADAPTERS:
                return AdapterState.UNKNOWN
            self._files[key] = before = now
        if before == now:
            return AdapterState.SAME
        self._files[key] = b""
        logger.warning(
            "the files of LoRA adapter %s in %s have changed: its requests do not use the CPU "
            "pool until the engine is restarted; load it under another name or path",
            *key,
        )
        return AdapterState.CHANGED

    def _not_known(self, key: tuple[str, str], why: str) -> AdapterState:
        """The pool may hold blocks of this adapter, so any files found later count as changed."""
        if len(self._files) < MOST_ADAPTERS or key in self._files:
            self._files[key] = b""
            logger.warning(
                "the scheduler cannot read the files of LoRA adapter %s in %s, so its requests do "
                "not use the CPU pool: %s",
                *key,
                why,
            )
        return AdapterState.UNKNOWN


def _identity(path: str) -> bytes:
    """A digest of the names, inodes, sizes and times of the adapter's files.

    It includes the inode change time, which no program can set. Raises `OSError` or `NotKnown`.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = model_folder(path, None, None)
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_READ_BY_VLLM):
                stat = entry.stat()
                one = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
                found.append((entry.name, *one))
    if not found:
        raise NotKnown(f"no file of an adapter in {folder}")
    return hashlib.blake2b(repr(sorted(found)).encode(), digest_size=16).digest()
