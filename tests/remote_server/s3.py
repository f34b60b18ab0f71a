"""A real S3 dialect on loopback: moto's server in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pytest

PATIENCE_S = 60.0


class S3(NamedTuple):
    """A running server with one empty bucket."""

    url: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]


@contextmanager
def s3_server() -> Iterator[S3]:
    """Started, and killed at the end."""
    pytest.importorskip("moto", reason="moto is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ,
    )  # fmt: skip
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _make_bucket(f"{endpoint}/blocks", process)
        yield S3(
            "s3://blocks/kv",
            {
                "AWS_ENDPOINT": endpoint, "AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test", "AWS_ALLOW_HTTP": "true",
            },
            process,
        )  # fmt: skip
    finally:
        process.kill()
        process.wait()


def _make_bucket(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "moto does not answer"
        try:
            request = urllib.request.Request(url, method="PUT")
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
