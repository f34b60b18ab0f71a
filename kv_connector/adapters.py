"""LoRA adapters whose blocks the CPU pool may hold: their files as they were at the first use.

vLLM's keys stand for an adapter by its name and path. An adapter that is replaced under both has
the keys of the old one, and vLLM's own cache serves the old KV then; the pool, which is larger
and lives longer, must not. So the identity of an adapter's files is compared at every lookup.
Once it has changed, the adapter keeps away from the pool for good: from here it is not seen
whether the engine had loaded the new files before or after a block was computed.
"""

import hashlib
import os
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kv_connector.fact_text import NotKnown
from kv_connector.weights import model_folder

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = init_logger("vllm.kvferry.adapters")

# Names of the files that vLLM reads begin so. Others of the folder, such as the state of a
# training run, may change.
_READ_BY_VLLM = ("adapter_", "new_embeddings")

# About 5 MB. Adapters beyond it keep away from the pool.
MOST_ADAPTERS = 16_384


class AdapterState(StrEnum):
    """Whether the pool may be used for an adapter."""

    SAME = auto()
    CHANGED = auto()
    UNKNOWN = auto()  # its files cannot be seen from here


class Adapters:
    """Each adapter by name and path, as vLLM's keys have it. The scheduler thread alone uses it."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], bytes] = {}
        """At the first use; empty once they have changed or could not be seen."""

    def look_at(self, adapter: "LoRARequest") -> AdapterState:
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
            "the files of LoRA adapter %s in %s have changed: its requests keep away from the CPU "
            "pool until the engine is restarted; load it under another name or path",
            *key,
        )
        return AdapterState.CHANGED

    def _not_known(self, key: tuple[str, str], why: str) -> AdapterState:
        """The pool may hold blocks of it, so that whatever is seen later counts as a change."""
        if len(self._files) < MOST_ADAPTERS or key in self._files:
            self._files[key] = b""
            logger.warning(
                "the files of LoRA adapter %s in %s cannot be seen from the scheduler, so its "
                "requests keep away from the CPU pool: %s",
                *key,
                why,
            )
        return AdapterState.UNKNOWN


def _identity(path: str) -> bytes:
    """Of the adapter's files: which they are, how long, and when they were last changed.

    The time of the last change of an inode is part of it: no program sets that. Raises `OSError`
    or `NotKnown`.
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
