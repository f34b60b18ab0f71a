"""A job for the copier whose turns a test counts."""

from collections.abc import Callable


class CountedJob:
    """Takes so many turns. `seen` gets its name at each one, and its name with `failed` at the end.
    The turn `broken` raises."""

    def __init__(
        self,
        seen: list,
        name: str = "job",
        turns: int = 1,
        *,
        broken: int = -1,
        num_bytes: int = 10,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.num_bytes = num_bytes
        self._seen, self._name = seen, name
        self._left, self._broken = turns, turns - broken
        self._on_end = on_end

    def work_some(self) -> bool:
        if self._left == self._broken:
            raise RuntimeError(self._name)
        self._left -= 1
        self._seen.append(self._name)
        return not self._left

    def end(self, failed: bool) -> None:
        self._on_end()
        self._seen.append((self._name, failed))
