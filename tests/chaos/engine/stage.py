"""One scene for the tests of a file, made good between them and built anew when that fails.

An engine takes tens of seconds to start, so tests share it. A test that fails may leave it with a
server that is away, rows that stay pinned or no life at all, and must not fail the next test.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Self

from outage import Scene


class Stage:
    """Builds a scene at first use. Leaving the stage ends the scene."""

    def __init__(self, build: Callable[[], AbstractContextManager[Scene]]) -> None:
        self._build = build
        self._now: Scene | None = None
        self._stack = ExitStack()

    def sound(self) -> Scene:
        """The scene, without an outage, with nothing held. Raises what a new scene fails with."""
        if self._now is not None:
            try:
                return self._made_good(self._now)
            except Exception as error:
                print(f"the scene is built anew, for the last test left it unsound: {error!r}")
                self.close()
        self._now = self._stack.enter_context(self._build())
        return self._made_good(self._now)

    def close(self) -> None:
        """End the scene. Safe to repeat."""
        self._now = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _made_good(self, scene: Scene) -> Scene:
        scene.give_back()
        scene.until_ready()
        scene.check()
        return scene
