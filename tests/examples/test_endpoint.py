"""The streaming client: when the first token came, and that nothing else is counted as one."""

import itertools
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from openai_fake import OpenAIFake, chunk, usage

from examples import endpoint
from examples.endpoint import Endpoint, EndpointError, FirstToken

pytestmark = pytest.mark.real_time

DONE = b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def one_server() -> Iterator[OpenAIFake]:
    with OpenAIFake().running() as fake:
        yield fake


@pytest.fixture
def server(one_server: OpenAIFake) -> OpenAIFake:
    one_server.forget()
    return one_server


@pytest.fixture
def asked(server: OpenAIFake, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """A clock that counts how often it was read: before the request, and once for each event. So
    `seconds` is the number of the event that was taken for the first token."""
    clock = itertools.count()
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    return Endpoint(server.url)


def first_token(asked: Endpoint, server: OpenAIFake, *events: Any) -> FirstToken:
    server.answers = [list(events)]
    return asked.first_token("the-model", [5, 6, 7])


IDS_ALONE = {"choices": [{"text": "", "token_ids": [9], "finish_reason": None}]}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (
            [
                b": a comment\n\n",
                chunk(""),
                {"choices": []},
                chunk("a"),
                chunk("b"),
                usage(3, 2, 2),
            ],
            FirstToken(3.0, 3, 2),
        ),
        ([chunk(), IDS_ALONE, chunk("b"), usage(3, 2)], FirstToken(2.0, 3, 2)),
        ([chunk(""), chunk("", "stop"), usage(3, 2)], FirstToken(2.0, 3, 2)),
        ([chunk("a")], FirstToken(1.0, None, None)),
        ([chunk("a"), usage(3)], FirstToken(1.0, 3, None)),
    ],
)
def test_the_first_chunk_that_has_a_token_is_the_first_token_and_nothing_is_made_up(
    asked: Endpoint, server: OpenAIFake, events: list[Any], expected: FirstToken
):
    assert first_token(asked, server, *events, DONE) == expected


def test_the_request_is_one_that_any_openai_server_takes(asked: Endpoint, server: OpenAIFake):
    first_token(asked, server, chunk("a"), DONE)
    assert server.bodies == [
        {
            "model": "the-model", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([chunk("a"), OpenAIFake.BREAK], "broke off in the middle of an answer"),
        ([chunk("a")], "broke off in the middle of an answer"),
        ([chunk("a"), OpenAIFake.RESET], "broke off in the middle of an answer"),
        ([OpenAIFake.BREAK], "broke off in the middle of an answer"),
        ([chunk("a"), {"error": {"message": "out of\nmemory"}}, DONE], "stream: out of memory"),
        ([chunk("", "stop"), usage(3, completion=0), DONE], "without a single token"),
        ([DONE], "without a single token"),
        ([b"data: {oops\n\n", DONE], "is not JSON"),
    ],
)
def test_an_answer_that_goes_wrong_is_reported_and_has_no_time(
    asked: Endpoint, server: OpenAIFake, events: list[Any], message: str
):
    with pytest.raises(EndpointError, match=message) as refused:
        first_token(asked, server, *events)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, '{"error": {"message": "too\\nlong"}}', "400 too long"),
        (400, '{"object": "error", "message": "too long"}', "400 too long"),
        (401, '{"error": "Unauthorized"}', "401 Unauthorized; pass its key with --api-key-env"),
        (404, '{"detail": "Not Found"}', "404 Not Found; is this an OpenAI-compatible server"),
        (500, "<html>\n broken </html>", "500 <html> broken </html>"),
        (503, "", "503 Service Unavailable"),
    ],
)
def test_an_error_status_is_one_line_with_the_servers_reason(
    asked: Endpoint, server: OpenAIFake, status: int, body: str, message: str
):
    server.refusal = status, body
    with pytest.raises(EndpointError) as refused:
        asked.first_token("the-model", "x")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_server_that_is_not_there_is_one_line_that_says_what_to_do():
    with socket.socket() as taken:  # bound and not listening: no other process gets the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EndpointError) as refused:
            Endpoint(url).model()
    assert str(refused.value) == (
        f"{url} cannot be reached (Connection refused); start one there with `vllm serve MODEL`, "
        "or let one be started here: --start instead of --url"
    )


def test_a_server_that_says_nothing_is_given_up(server: OpenAIFake):
    server.answers = [[chunk(), OpenAIFake.HOLD]]
    with pytest.raises(EndpointError, match=r"sent nothing for 0\.2 s"):
        Endpoint(server.url, timeout_s=0.2).first_token("the-model", "x")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "tcp://127.0.0.1:5757", ""])
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(EndpointError, match="not an address; write it like http"):
        Endpoint(url)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/"])
def test_the_model_is_asked_for_by_any_form_of_the_address(server: OpenAIFake, tail: str):
    assert Endpoint(server.url + tail).model() == "the-model"


def test_headers_go_with_every_request(server: OpenAIFake):
    Endpoint(server.url, headers={"Authorization": "Bearer s3cret"}).model()
    assert server.headers[-1]["Authorization"] == "Bearer s3cret"


def test_metrics_are_those_of_vllm_or_none(server: OpenAIFake):
    assert Endpoint(server.url).metrics() is None
    server.pages["/metrics"] = 'go_threads{a="b"} 4\n'
    assert Endpoint(server.url).metrics() is None
    server.pages["/metrics"] = '# HELP\nvllm:a_total{b="c d"} 4.0\nup 1\n'
    assert Endpoint(server.url).metrics() == {'vllm:a_total{b="c d"}': 4.0, "up": 1.0}
    server.pages["/metrics"] = "<html>vllm: not a page of samples</html>"
    assert Endpoint(server.url).metrics() is None
