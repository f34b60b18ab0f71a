"""A headless Chromium, driven over its DevTools protocol."""

import asyncio
import base64
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Self

import aiohttp
import pytest

PATIENCE_S = 60.0

_ALONE = ("--single-process", "--no-zygote", "--headless=shell")  # for a build made to be unpacked


def find_chromium() -> Path | None:
    """`KVFERRY_CHROMIUM`, or what is on the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
    named = os.environ.get("KVFERRY_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found and Path(found).exists() else None


def chromium_or_skip() -> Path:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on the PATH, and KVFERRY_CHROMIUM names none")
    return chromium


class Browser:
    """`async with Browser(chromium) as browser:` one page, gone afterwards."""

    def __init__(self, chromium: Path) -> None:
        self._chromium = chromium
        self.problems: list[str] = []
        """What the page's console reported: errors, and what its policy forbade."""
        self._last = 0

    async def __aenter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        lib = self._chromium.parent / "lib"
        mode = _ALONE if lib.is_dir() else ("--headless=new",)
        self._process = await asyncio.create_subprocess_exec(
            self._chromium, *mode, "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-proxy-server", "--no-first-run", f"--user-data-dir={self._folder.name}",
            "--remote-debugging-port=0", "about:blank",
            env=self._environment(lib),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._session = aiohttp.ClientSession()
        try:
            await asyncio.wait_for(self._attach(), PATIENCE_S)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _environment(self, lib: Path) -> dict[str, str]:
        environment = dict(os.environ)
        if not lib.is_dir():
            return environment
        fonts = Path(self._folder.name) / "fonts.conf"
        fonts.write_text(
            f"<fontconfig><dir>{lib.parent / 'fonts'}</dir>"
            f"<cachedir>{self._folder.name}/fonts</cachedir></fontconfig>"
        )
        libraries = f"{lib}:{lib.parent}"
        return environment | {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(fonts)}

    async def _attach(self) -> None:
        assert self._process.stderr is not None
        port = None
        while port is None:
            line = (await self._process.stderr.readline()).decode()
            assert line, "the browser ended before it could be driven"
            port = re.search(r"listening on ws://[^:]+:(\d+)/", line)
        async with self._session.get(f"http://127.0.0.1:{port[1]}/json/list") as listed:
            (page, *_) = [one for one in await listed.json() if one["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        # A page without a window's focus moves its own focus but fires no event of it.
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()
        self._folder.cleanup()

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools method and what it returned."""
        self._last += 1
        await self._socket.send_json({"id": self._last, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), PATIENCE_S)
            if message.get("id") == self._last:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    async def open(self, url: str) -> None:
        """Go there and wait until it has loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression, or promise, comes to."""
        said = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not await self.value(expression):
            assert asyncio.get_running_loop().time() < deadline, f"never: {expression}"
            await asyncio.sleep(0.02)

    async def show(self, width: int, height: int, *, dark: bool = False) -> None:
        """As on a screen of this size, by day or at night."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """What is seen, as a PNG."""
        taken = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(taken["data"])
