"""A real S3 dialect on loopback: moto's server in a process of its own, or one that is given."""

import os
import signal
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
from store_process import store_process, until_answered

GIVEN = "KVFERRY_TEST_S3"
"""`http://HOST:PORT/BUCKET`: tests run over the bucket of this store, which exists, with the
credentials of the environment. Each test has a folder of its own there, and removes it."""

GIVEN_PID = "KVFERRY_TEST_S3_PID"
"""The process of that store, for the tests that stop it for a while."""


class S3(NamedTuple):
    """A running server with one bucket; `url` is an empty folder there."""

    url: str
    environment: dict[str, str]
    pid: int = 0

    @property
    def address(self) -> str:
        """Its host and port."""
        return urlsplit(self.environment["AWS_ENDPOINT"]).netloc

    def freeze(self) -> None:
        """SIGSTOP, until `thaw`."""
        if not self.pid:
            pytest.skip(f"{GIVEN_PID} has no process of the store that is given")
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Have it go on, if it stands still."""
        if self.pid:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def s3_server() -> Iterator[S3]:
    """Started, and killed at the end; or a new folder of the one that is given."""
    if GIVEN in os.environ:
        yield from _given(os.environ[GIVEN])
        return
    pytest.importorskip("moto", reason="moto is not installed")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}"]
    with store_process(command) as (port, process):
        endpoint = f"http://127.0.0.1:{port}"
        until_answered(lambda: _make_bucket(f"{endpoint}/blocks"), process)
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        yield S3("s3://blocks/kv", _environment(endpoint) | keys, process.pid)


def _environment(endpoint: str) -> dict[str, str]:
    return {"AWS_ENDPOINT": endpoint, "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}


def _given(address: str) -> Iterator[S3]:
    from remote_server.store.bucket.objects.client import StoreObjects

    parts = urlsplit(address)
    bucket, environment = parts.path.strip("/"), _environment(f"{parts.scheme}://{parts.netloc}")
    url = f"s3://{bucket}/kvferry-tests/{uuid.uuid4().hex}"
    pid = int(os.environ.get(GIVEN_PID, 0))
    yield S3(url, environment, pid)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        objects = StoreObjects(url)
        for chunk in objects.listing(""):
            objects.remove([one.name for one in chunk])


def _make_bucket(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=5).close()
