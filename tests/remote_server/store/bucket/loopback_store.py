"""A handler of HTTP as a store of S3's dialect on loopback, in this process."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loopback_store(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[dict[str, str]]:
    """The environment in which `s3://any/prefix` is that store."""
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
