"""An OpenAI-compatible server with scripted answers, on a thread of its own."""

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web


def chunk(text: str = "", finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": finish}], **more}


def usage(prompt: int, cached: int | None = None, completion: int = 1) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": details}}


class OpenAIFake:
    """`answers` are used up one by one, the last one for ever. Each is a list of what to send:
    a dict is an event, bytes are sent as they are, `BREAK` hangs up, `RESET` as a killed host
    does, `HOLD` never goes on."""

    BREAK, RESET, HOLD = object(), object(), object()

    def __init__(self) -> None:
        self.url = ""
        self.forget()

    def forget(self) -> None:
        """As new, for the next test."""
        self.answers: list[list[Any]] = [[chunk("a"), usage(20), b"data: [DONE]\n\n"]]
        self.refusal: tuple[int, str] | None = None
        self.pages = {"/v1/models": json.dumps({"data": [{"id": "the-model"}]})}
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.holding = threading.Event()

    async def _page(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        if request.path not in self.pages:
            return web.Response(status=404, text="no such page")
        return web.Response(text=self.pages[request.path])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.refusal is not None:
            return web.Response(status=self.refusal[0], text=self.refusal[1])
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in answer:
            if part in (self.BREAK, self.RESET):
                assert request.transport is not None
                if part is self.RESET:
                    connection = request.transport.get_extra_info("socket")
                    at_once = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                request.transport.abort()
                return response
            if part is self.HOLD:
                self.holding.set()
                await asyncio.Event().wait()
            data = part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode()
            await response.write(data)
        return response

    @contextmanager
    def running(self) -> Iterator["OpenAIFake"]:
        loop = asyncio.new_event_loop()
        ready = threading.Event()

        async def serve() -> web.AppRunner:
            app = web.Application(client_max_size=64 << 20)
            app.router.add_get("/{path:.*}", self._page)
            app.router.add_post("/v1/completions", self._complete)
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = "http://{}:{}".format(*runner.addresses[0])
            return runner

        def work() -> None:
            runner = loop.run_until_complete(serve())
            ready.set()
            loop.run_forever()
            loop.run_until_complete(runner.cleanup())
            loop.close()

        thread = threading.Thread(target=work)
        thread.start()
        assert ready.wait(60)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            assert not thread.is_alive()
