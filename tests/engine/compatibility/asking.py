"""Requests of other kinds than a text completion: about images, for vectors, and from embeddings.

Each answer compares itself with another one, as a `Completion` does.
"""

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from cluster import Engine, QuickEngine
from model_builders import IMAGE_PIXELS

from examples.engine import Completion, Verdict

ANSWER_TOKENS = 12

VECTOR_TIE = 0.02
"""Components of a normalized vector within this of each other are equal: the model's states have 16
bits, and a hit changes the order of sums as a batch does."""


class Answer(Protocol):
    """What an engine answers, whatever it was asked for."""

    def compared_with(self, reference: Self, /) -> Verdict: ...


Ask = Callable[[Engine], Answer]
"""The same request to this engine, each time."""


class Vector(NamedTuple):
    """The answer of an engine that embeds."""

    values: tuple[float, ...]

    def compared_with(self, reference: "Vector") -> Verdict:
        if self == reference:
            return "equal"
        pairs = zip(self.values, reference.values, strict=True)
        return "tied" if max(abs(a - b) for a, b in pairs) <= VECTOR_TIE else "wrong"


class EmbeddingEngine(QuickEngine):
    """One without completions: it answers a prompt with a vector."""

    def ask(self, prompt: list[int], max_tokens: int = 0, **extra: Any) -> Any:
        body = {"model": self.model, "input": prompt, **extra}
        with self._request("POST", "/v1/embeddings", body, timeout_s=300) as response:
            (only,) = json.load(response)["data"]
        return Vector(tuple(only["embedding"]))


def tokens(prompt: list[int], **extra: Any) -> Ask:
    """The continuation of a prompt of tokens."""
    return lambda engine: engine.ask(prompt, ANSWER_TOKENS, **extra)


def embeddings(tokens: int, width: int) -> Ask:
    """The continuation of a prompt that is embeddings, without any token."""

    def ask(engine: Engine) -> Completion:
        body = {"prompt": None, "prompt_embeds": _encoded(tokens, width)}
        return engine.complete([], ANSWER_TOKENS, extra=body)

    return ask


def _encoded(tokens: int, width: int) -> str:
    """Random embeddings, equal each time, as vLLM takes them."""
    import torch

    generator = torch.Generator().manual_seed(5001)
    values = torch.randn(tokens, width, generator=generator) * 0.08
    file = io.BytesIO()
    torch.save(values.to(torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


def two_images(words: int) -> Ask:
    """A question of so many words about two different images, in a chat."""
    chance = random.Random(5002)
    text = " ".join("".join(chance.choices("aeioknrst", k=5)) for _ in range(words))
    images = [
        {"type": "image_url", "image_url": {"url": _picture(color)}}
        for color in ((200, 30, 60), (20, 180, 90))
    ]
    content = [images[0], {"type": "text", "text": text}, images[1]]

    def ask(engine: Engine) -> Completion:
        body = {
            "model": engine.model, "messages": [{"role": "user", "content": content}],
            "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
            "logprobs": True, "top_logprobs": 5, "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        with engine._request("POST", "/v1/chat/completions", body, timeout_s=300) as response:
            whole = json.load(response)
        (choice,) = whole["choices"]
        places = choice["logprobs"]["content"]
        return Completion(
            text=choice["message"]["content"] or "",
            token_ids=[int(place["token"].removeprefix("token_id:")) for place in places],
            logprobs=[
                {each["token"]: each["logprob"] for each in place["top_logprobs"]}
                for place in places
            ],
            prompt_tokens=whole["usage"]["prompt_tokens"],
            cached_tokens=0,
            ttft_s=0.0,
            total_s=0.0,
            usage=whole["usage"],
        )

    return ask


def _picture(color: tuple[int, int, int]) -> str:
    """The address of a picture with noise around a color."""
    from PIL import Image

    chance = random.Random(str(color))
    image = Image.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS))
    image.putdata([
        tuple(min(255, part + chance.randrange(40)) for part in color)
        for _ in range(IMAGE_PIXELS**2)
    ])  # fmt: skip
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
