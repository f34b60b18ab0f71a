"""A store on loopback whose answers claim to be longer than any memory."""

import http.server
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from loopback_store import loopback_store

ALL_MEMORY = 1 << 62


class HugeAnswers(http.server.BaseHTTPRequestHandler):
    """Each answer has this status, some bytes, and `ALL_MEMORY` of them by its header."""

    protocol_version = "HTTP/1.1"
    status: ClassVar[int] = 200

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def answer(self) -> None:
        """To any request."""
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(self.status)
        self.send_header("Content-Length", str(ALL_MEMORY))
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        with suppress(OSError):  # the client has died of it
            self.wfile.write(b"x" * 1_000_000)  # it takes memory for the rest at its second part
        self.close_connection = True


@contextmanager
def huge_answers(status: int = 200) -> Iterator[dict[str, str]]:
    """The environment in which `s3://any/prefix` is that store."""
    methods = [f"do_{name}" for name in ("GET", "PUT", "HEAD", "DELETE", "POST")]
    answers = dict.fromkeys(methods, HugeAnswers.answer)
    handler = type("Handler", (HugeAnswers,), {"status": status, **answers})
    with loopback_store(handler) as environment:
        yield environment
