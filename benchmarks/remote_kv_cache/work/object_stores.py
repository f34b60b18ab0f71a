"""Object stores for benchmarks: folders, addresses, and an emulator of S3 that is started here."""

import importlib.util
import os
import secrets
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from urllib.parse import urlsplit

from benchmarks.harness.files import drop_from_cache
from benchmarks.harness.runner import Skipped
from examples.processes import LoggedProcess, free_port
from remote_server.errors import ConfigError
from remote_server.store.bucket.objects.client import StoreObjects
from remote_server.store.bucket.objects.objects import BucketError

TMPFS, DISK, EMULATOR = "tmpfs", "disk", "emulator"
NAMES = (TMPFS, DISK, EMULATOR)

_BUCKET = "benchmark"
_ANSWER_S = 5.0


class Store(NamedTuple):
    """A place of its own in an object store. Its environment is in force while it is open."""

    name: str
    url: str
    description: str

    @property
    def folder(self) -> Path | None:
        """Of a store that is a folder."""
        parts = urlsplit(self.url)
        return Path(parts.path) if parts.scheme == "file" else None

    def drop_from_cache(self) -> None:
        """The next read of an object of a folder goes to the device."""
        if self.folder is not None and self.name == DISK:
            for path in self.folder.rglob("*"):
                if path.is_file():
                    drop_from_cache(path)


class Emulator(LoggedProcess):
    """moto's server, an emulator of S3 in Python, with one empty bucket."""

    name = "moto"

    def __init__(self) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)])
        self.url = f"s3://{_BUCKET}"
        self._endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT": self._endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        }  # fmt: skip

    def is_ready(self) -> bool:
        request = urllib.request.Request(f"{self._endpoint}/{_BUCKET}", method="PUT")
        try:
            urllib.request.urlopen(request, timeout=_ANSWER_S).close()
        except OSError:
            return False
        return True


@contextmanager
def opened(name: str, directory: Path) -> Iterator[Store]:
    """A place of its own in the store `name`: one of `NAMES`, or an address as `--bucket` has it,
    with the variables of that store in the environment. It is emptied at the end.

    `directory` is on the disk to be used. Raises `Skipped`.
    """
    if importlib.util.find_spec("obstore") is None:
        raise Skipped("obstore is not installed: pip install '.[bucket]'")
    with ExitStack() as stack:
        url, description = _address(stack, name, directory)
        url = f"{url.rstrip('/')}/kvferry-{secrets.token_hex(4)}"
        store = Store(name if name in NAMES else urlsplit(url).scheme, url, description)
        try:
            StoreObjects(url).size_of("probe")
        except (ConfigError, BucketError) as error:
            raise Skipped(f"{name} cannot be read: {error}") from None
        stack.callback(_empty, store)
        yield store


def _address(stack: ExitStack, name: str, directory: Path) -> tuple[str, str]:
    if name == TMPFS:
        if not Path("/dev/shm").is_dir():
            raise Skipped("there is no /dev/shm")
        return "file:///dev/shm", "a folder in memory (tmpfs)"
    if name == DISK:
        return f"file://{directory.resolve()}", "a folder on a disk"
    if name == EMULATOR:
        if importlib.util.find_spec("moto") is None:
            raise Skipped("moto, the emulator of S3, is not installed")
        emulator = stack.enter_context(Emulator())
        stack.enter_context(patch.dict(os.environ, emulator.environment))
        return emulator.url, "an emulator of S3 (moto, in Python), on the same cores"
    where = os.environ.get("AWS_ENDPOINT") or os.environ.get("AZURE_STORAGE_ENDPOINT")
    scheme = urlsplit(name).scheme
    if scheme == "file":
        return name, "a folder (file://)"
    if where and ("127.0.0.1" in where or "localhost" in where or "[::1]" in where):
        return name, f"{scheme}:// of an emulator on this machine, not of the cloud"
    return name, f"{scheme}://"


def _empty(store: Store) -> None:
    if store.folder is not None:
        shutil.rmtree(store.folder, ignore_errors=True)
        return
    objects = StoreObjects(store.url)
    for listed in [*objects.listing("")]:
        objects.remove([each.name for each in listed])
