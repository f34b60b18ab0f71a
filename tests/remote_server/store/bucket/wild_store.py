"""A store of S3's dialect on loopback, in this process, whose answers are wild while a program
lasts: status, headers, lengths, bodies, and connections that end."""

import http.server
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from hypothesis import strategies as st
from loopback_store import loopback_store

HUGE = "4611686018427387904"
"""As a length it ends the process of the client."""


class Step(NamedTuple):
    """One change of the answer to one request."""

    what: str
    a: int
    b: int


class Answer(NamedTuple):
    """What is sent, also where it contradicts itself."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


STATUSES = (
    200, 201, 204, 206, 301, 302, 304, 307, 400, 401, 403, 404, 409, 412, 416, 429, 500,
    503, 599, 100,
)  # fmt: skip

HEADERS: Sequence[tuple[str, Sequence[str]]] = (
    ("Content-Length", ("0", "1", "100", "-1", "x", "", "1, 1", "18446744073709551616")),
    ("Content-Range", (
        "", "bytes 0-0/1", "bytes 5-1/9", "bytes */0", "bytes 0-99/*", "x", "bytes 4096-8191/20000",
        "bytes 0-18446744073709551615/18446744073709551615", f"bytes 0-{HUGE}/{HUGE}",
    )),
    ("ETag", ("", '"', "x" * 9000, "é")),
    ("Last-Modified", (
        "", "x", "Thu, 01 Jan 1970 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT",
        "Mon, 01 Jan 0001 00:00:00 GMT", "Mon, 99 Foo 2024 99:99:99 GMT",
    )),
    ("Content-Encoding", ("gzip", "br", "x")),
    ("Transfer-Encoding", ("chunked", "gzip", "x")),
    ("Content-Type", ("text/html", "")),
    ("Location", ("", "/", "http://127.0.0.1:1/x", "file:///etc/passwd")),
)  # fmt: skip

TEXTS: Sequence[tuple[str, str]] = (
    (r"<Size>\d+", "<Size>-1"), (r"<Size>\d+", "<Size>18446744073709551615"),
    (r"<Size>\d+", "<Size>99999999999999999999"), ("<Key>", "<Key>../"), ("<Key>", "<Key>/"),
    ("<Key>", "<Key>&#0;"), ("v1", "v2"), ("<Key>[^<]*", "<Key>"), ("</Key>", "é%00//</Key>"),
    ("<LastModified>[^<]*", "<LastModified>x"), ("Contents", "Content"), ("Prefix", "Suffix"),
    ("<LastModified>[^<]*", "<LastModified>9999-12-31T23:59:59Z"),
    ("<LastModified>[^<]*", "<LastModified>0001-01-01T00:00:00Z"),
    ("<IsTruncated>false", "<IsTruncated>true"), ("^", "<!DOCTYPE a [<!ENTITY b 'c'>]>"),
    ("<", "<<"), (">", ""), ("^.*", "<a>" * 5000), ("Result>", "Error>"), ("Deleted", "Error"),
)  # fmt: skip
"""Of the body of a list and the like: a pattern and its replacement."""

KINDS = (
    "status", "status", "header", "header", "no header", "text", "text", "cut", "grow", "flip",
    "flip", "flip", "empty", "another", "close", "huge",
)  # fmt: skip

programs = st.lists(
    st.builds(Step, st.sampled_from(KINDS), st.integers(0, 999), st.integers(0, 999)), max_size=5
)


class WildStore:
    """Its objects by name, honest until `begin` and after the program is over."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.date = "Mon, 01 Jan 2024 00:00:00 GMT"
        """Of each object that is read."""
        self.num_wild = 0
        """Answers that were changed."""
        self._lock = threading.Lock()
        self._program: list[Step] = []

    def begin(self, program: Sequence[Step]) -> None:
        """Each step changes the answer to one request from now on."""
        with self._lock:
            self._program = [*program][::-1]

    def end(self) -> None:
        """Be honest again."""
        self.begin([])

    def answer(
        self, method: str, target: str, headers: Any, body: bytes
    ) -> tuple[Answer, Step | None]:
        with self._lock:
            step = self._program.pop() if self._program else None
            if step is not None:
                self.num_wild += 1
            is_lost = step is not None and step.b % 2 == 1 and method in ("PUT", "POST")
            honest = self._honest(method, target, headers, body, is_lost=is_lost)
            return (honest if step is None else self._wild(honest, step)), step

    # ── honest ───────────────────────────────────────────────────────────────────────────

    def _honest(
        self, method: str, target: str, headers: Any, body: bytes, *, is_lost: bool
    ) -> Answer:
        """What a store answers. A write that `is_lost` is answered and not done."""
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        name = unquote(parts.path).removeprefix("/blocks").lstrip("/")
        if method == "PUT":
            if headers.get("If-None-Match") == "*" and name in self.objects:
                return _error(412, "PreconditionFailed")
            if not is_lost:
                self.objects[name] = body
            return Answer(200, {"ETag": '"x"'})
        if method == "POST" and "delete" in query:
            names = [unquote(each) for each in re.findall("<Key>([^<]*)</Key>", body.decode())]
            for each in names if not is_lost else ():
                self.objects.pop(each, None)
            deleted = "".join(f"<Deleted><Key>{escape(each)}</Key></Deleted>" for each in names)
            return _xml(200, f"<DeleteResult>{deleted}</DeleteResult>")
        if method == "GET" and "list-type" in query:
            return self._list(query["prefix"][0] if "prefix" in query else "", "delimiter" in query)
        data = self.objects.get(name)
        if data is None:
            return _error(404, "NoSuchKey")
        return _object(data, headers.get("Range"), self.date)

    def _list(self, prefix: str, is_flat: bool) -> Answer:
        names = sorted(name for name in self.objects if name.startswith(prefix))
        shown = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            "<LastModified>2024-01-01T00:00:00Z</LastModified><ETag>x</ETag></Contents>"
            for name in names if not (is_flat and "/" in name[len(prefix) :])
        )  # fmt: skip
        if is_flat:
            tails = {name[len(prefix) :].partition("/")[0] for name in names}
            shown += "".join(
                f"<CommonPrefixes><Prefix>{escape(prefix + tail)}/</Prefix></CommonPrefixes>"
                for tail in sorted(tails)
            )
        return _xml(
            200, f"<ListBucketResult><Name>blocks</Name><IsTruncated>false</IsTruncated>{shown}"
            "</ListBucketResult>",
        )  # fmt: skip

    # ── wild ─────────────────────────────────────────────────────────────────────────────

    def _wild(self, answer: Answer, step: Step) -> Answer:
        what, a, b = step
        _, headers, body = answer
        match what:
            case "status":
                return answer._replace(status=STATUSES[a % len(STATUSES)])
            case "header":
                name, values = HEADERS[a % len(HEADERS)]
                return answer._replace(headers=headers | {name: values[b % len(values)]})
            case "no header":
                name = [*headers, ""][a % (len(headers) + 1)]
                return answer._replace(headers={k: v for k, v in headers.items() if k != name})
            case "text":
                pattern, text = TEXTS[a % len(TEXTS)]
                changed = re.sub(pattern, text, body.decode("latin-1")).encode("utf-8")
                return _with_body(answer, changed)
            case "cut":
                return _with_body(answer, body[: len(body) * a // 1000], agrees=b % 2 == 0)
            case "grow":
                return _with_body(answer, body + bytes(a * 20), agrees=b % 2 == 0)
            case "flip" if body:
                at = len(body) * a // 1000
                return answer._replace(
                    body=body[:at] + bytes([body[at] ^ 1 << b % 8]) + body[at + 1 :]
                )
            case "empty":
                return _with_body(answer, b"", agrees=b % 2 == 0)
            case "another" if self.objects:
                others = sorted(self.objects)
                return _object(self.objects[others[a % len(others)]], None, self.date)
            case "huge" if a < 100:
                return answer._replace(headers=headers | {"Content-Length": HUGE})
        return answer


def _with_body(answer: Answer, body: bytes, *, agrees: bool = True) -> Answer:
    headers = answer.headers | ({"Content-Length": str(len(body))} if agrees else {})
    return Answer(answer.status, headers, body)


def _xml(status: int, body: str) -> Answer:
    return _with_body(Answer(status, {"Content-Type": "application/xml"}), body.encode())


def _error(status: int, code: str) -> Answer:
    return _xml(status, f"<Error><Code>{code}</Code><Message>of the test</Message></Error>")


def _object(data: bytes, wanted: str | None, date: str) -> Answer:
    headers = {"ETag": '"x"', "Last-Modified": date}
    found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "")
    if found is None:
        return _with_body(Answer(200, headers), data)
    begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
    if begin >= len(data):
        return _error(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
    return _with_body(Answer(206, headers), data[begin:end])


@contextmanager
def wild_store() -> Iterator[tuple[WildStore, dict[str, str]]]:
    """The store, and the environment in which `s3://blocks/kv` is in it."""
    store = WildStore()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Be quiet."""

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer, step = store.answer(self.command, self.path, self.headers, body)
            if step is not None:
                self.close_connection = True
                if step.what == "close":
                    return
            self.send_response_only(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers and step is None:
                self.send_header("Content-Length", str(len(answer.body)))
            with suppress(OSError, UnicodeError):  # the client has left
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer.body)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = answer  # noqa: N815

    with loopback_store(Handler) as environment:
        yield store, environment
