"""A client of a running OpenAI-compatible server that times the first token.

Completions are streamed, because only then is there a first token to time. Optional facts of the
server are used and none is required: the model's name, cached tokens in the usage, and vLLM's
`/metrics`.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from examples.engine import parse_metrics
from examples.make_dummy_inputs import Prompt


class EndpointError(RuntimeError):
    """The server is unreachable, refused, or broke off. One line, with a remedy if one is known."""


@dataclass(frozen=True)
class FirstToken:
    """One prompt answered."""

    seconds: float  # from connecting to the first token
    prompt_tokens: int | None  # None when the server does not report them
    cached_tokens: int | None


class Endpoint:
    """The server at `url`, with or without a trailing `/v1`.

    `headers` are sent with every request. Every request has its own connection, which is closed
    after it, also after Ctrl-C.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
    ) -> None:
        """Raises `EndpointError` when `url` is not an address. Sends nothing."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise EndpointError(f"--url {url}: not an address; write it like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._host, self._port = parts.hostname, port
        self._secure = parts.scheme == "https"
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})

    def model(self) -> str:
        """The name of the served model; the first of several."""
        with self._request("GET", "/v1/models") as response:
            answer = _json(response.read(), "/v1/models")
        try:
            name = answer["data"][0]["id"]
        except (LookupError, TypeError):
            raise EndpointError(
                f"{self.url}/v1/models names no model; name one: --model NAME"
            ) from None
        return str(name)

    def first_token(
        self,
        model: str,
        prompt: Prompt,
        max_tokens: int = 1,
        extra: Mapping[str, Any] | None = None,
    ) -> FirstToken:
        """Send `prompt`, read the whole answer, and return the time of its first token.

        That is the first chunk with text or token ids; earlier chunks that only open the stream do
        not count. If the whole answer is one token without text, such as an end token, it is the
        chunk that ends it. Raises `EndpointError` if the answer is an error, is empty, or breaks
        off: the time of such a request has no meaning.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(extra or {}),
        }
        first = last = None
        usage: Mapping[str, Any] = {}
        began = time.perf_counter()
        with self._request("POST", "/v1/completions", body) as response:
            for chunk in self._chunks(response):
                now = time.perf_counter()
                if "error" in chunk:
                    raise EndpointError(f"{self.url} ended the stream: {_reason(chunk)}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or []:
                    if first is None and (choice.get("text") or choice.get("token_ids")):
                        first = now
                    if choice.get("finish_reason"):
                        last = now
        if first is None and usage.get("completion_tokens"):
            first = last
        if first is None:
            raise EndpointError(f"{self.url} answered without a single token")
        details = usage.get("prompt_tokens_details") or {}
        return FirstToken(first - began, usage.get("prompt_tokens"), details.get("cached_tokens"))

    def metrics(self) -> dict[str, float] | None:
        """The samples of vLLM's `/metrics`; None without such a page, or when it is not vLLM's."""
        try:
            with self._request("GET", "/metrics") as response:
                samples = parse_metrics(response.read().decode(errors="replace"))
        except (EndpointError, ValueError):
            return None
        return samples if any(name.startswith("vllm:") for name in samples) else None

    @property
    def _broke_off(self) -> str:
        return f"{self.url} broke off in the middle of an answer; see its log"

    def _chunks(self, response: HTTPResponse) -> Iterator[dict[str, Any]]:
        """The JSON of each event, up to the end of the stream."""
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = _json(data, "an event of the stream")
            if isinstance(chunk, dict):
                yield chunk
        raise EndpointError(self._broke_off)

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[HTTPResponse]:
        # http.client and not urllib: it never uses a proxy for a loopback address.
        kind = HTTPSConnection if self._secure else HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        answered = False
        try:
            headers = {"Content-Type": "application/json", **self._headers}
            data = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, data, headers)
            response = connection.getresponse()
            answered = True
            if response.status != 200:
                raise EndpointError(self._refusal(path, response))
            yield response
        except TimeoutError:
            raise EndpointError(
                f"{self.url} sent nothing for {self._timeout_s:g} s; is it still loading?"
            ) from None
        except (HTTPException, OSError) as error:
            if answered:
                raise EndpointError(f"{self._broke_off} ({error!r})") from None
            reason = getattr(error, "strerror", None) or repr(error)
            raise EndpointError(
                f"{self.url} cannot be reached ({reason}); start one there with "
                "`vllm serve MODEL`, or let one be started here: --start instead of --url"
            ) from None
        finally:
            connection.close()

    def _refusal(self, path: str, response: HTTPResponse) -> str:
        text = response.read(4096).decode(errors="replace")
        try:
            reason = _reason(json.loads(text))
        except ValueError:
            reason = " ".join(text.split())[:300]
        hints = {
            401: "; pass its key with --api-key-env",
            404: "; is this an OpenAI-compatible server, and is --model the name it serves?",
        }
        hint = hints.get(response.status, "")
        return f"{self.url}{path}: {response.status} {reason or response.reason}{hint}"


def _json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise EndpointError(f"{what} is not JSON: {data[:80]!r}") from None


def _reason(answer: Any) -> str:
    """The message of an error, in any of the usual forms, as one line."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:300]
