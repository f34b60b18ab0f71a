"""A store on loopback whose answers claim to be longer than any memory."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {
            "AWS_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
