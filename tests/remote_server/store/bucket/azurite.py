"""A real dialect of Azure Blob on loopback: Azurite, which `make test-azure` installs."""

import base64
import hashlib
import hmac
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

import pytest
from store_process import store_process, until_answered

INSTALLED = Path(__file__).resolve().parents[4] / ".peers/azurite/node_modules/.bin/azurite-blob"

# Azurite's own account and key, which its documentation publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "blocks"


class Azure(NamedTuple):
    """A running server with one empty container."""

    url: str
    environment: dict[str, str]
    address: str


@contextmanager
def azure_server() -> Iterator[Azure]:
    """Started, and killed at the end. Skips the test where it is not installed."""
    program = INSTALLED if INSTALLED.exists() else shutil.which("azurite-blob")
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    if program is None:
        pytest.skip("Azurite is not installed: `make test-azure` does it")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program), "--blobHost", "127.0.0.1", "--blobPort", "{port}", "--location", folder,
            "--skipApiVersionCheck", "--disableTelemetry", "--silent",
        ]  # fmt: skip
        with store_process(command) as (port, process):
            endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
            until_answered(lambda: _make_container(endpoint), process)
            yield Azure(
                f"az://{CONTAINER}/kv",
                {
                    "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                    "AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_ALLOW_HTTP": "true",
                },
                f"127.0.0.1:{port}",
            )  # fmt: skip


def _make_container(endpoint: str) -> None:
    """No client of object stores makes a container: the request is signed here."""
    headers = {
        "x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06",
    }  # fmt: skip
    fields = ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in sorted(headers.items()))]
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    digest = hmac.new(
        base64.b64decode(KEY), "\n".join([*fields, resource]).encode(), hashlib.sha256
    ).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{endpoint}/{CONTAINER}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request, timeout=5).close()
