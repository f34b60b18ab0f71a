"""A store that answers with redirects: what another host receives, and over which connections."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from remote_server.store.bucket.objects.client import StoreObjects, open_store
from remote_server.store.bucket.objects.objects import BucketError

pytestmark = pytest.mark.real_time

SECRETS = {
    "AWS_ACCESS_KEY_ID": "the-id", "AWS_SECRET_ACCESS_KEY": "the-secret",
    "AWS_SESSION_TOKEN": "the-token", "AWS_REGION": "us-east-1",
}  # fmt: skip


@contextmanager
def host(status: int, location: str = "") -> Iterator[tuple[int, list[Message]]]:
    """An HTTP server on loopback that answers all requests so: its port, and the headers that it
    receives."""
    received: list[Message] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            received.append(self.headers)
            self.send_response(status)
            if location:
                self.send_header("location", location + self.path)
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_HEAD = do_PUT = do_POST = answer  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_brings_another_host_no_signature_and_no_secret(monkeypatch, status):
    """The session token comes there: it signs nothing without the secret key, and the client has no
    option to keep it back. Nor has it one for a SAS. security.md has both."""
    with ExitStack() as hosts:
        port, received = hosts.enter_context(host(404))
        first, _ = hosts.enter_context(host(status, f"http://localhost:{port}"))
        for name, value in SECRETS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT", f"http://127.0.0.1:{first}")
        objects = StoreObjects("s3://bucket/prefix")
        for call in (
            lambda: objects.read("one", 0, 3),
            lambda: objects.size_of("one"),
            lambda: [*objects.listing("")],
            lambda: objects.put("one", memoryview(b"abc")),
        ):
            try:
                call()
            except BucketError:
                continue
    assert received, "the client follows redirects"
    for headers in received:
        assert "authorization" not in headers
        assert not {"the-id", "the-secret"} & {word for v in headers.values() for word in v.split()}


@pytest.mark.parametrize(("scheme", "may_be_plain"), [("http", True), ("https", False)])
def test_only_an_endpoint_without_encryption_allows_connections_without(
    monkeypatch, scheme, may_be_plain
):
    """With one that encrypts, a redirect to http:// would send the session token in clear."""
    for name, value in {**SECRETS, "AWS_ENDPOINT": f"{scheme}://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    options = open_store("s3://bucket").client_options or {}  # type: ignore[union-attr]
    assert bool(options.get("allow_http")) == may_be_plain
