"""News of a store: the blocks that became readable, and those that have left all of its tiers.

Each tier reports what enters and leaves its own index. A block that another tier has as well has
neither come nor gone. So each block of the news has come once since it last went, and a reader of
all news knows what the server holds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from remote_server.protocol import Stretch


class Held(Protocol):
    """A block in some tier."""

    @property
    def namespace(self) -> str: ...
    @property
    def key(self) -> bytes: ...
    @property
    def chain(self) -> Stretch: ...


class Holder(Protocol):
    """A tier."""

    def report_to(self, journal: "Journal") -> None:
        """From now on `journal` learns what becomes readable here and what leaves."""

    def has(self, namespace: str, key: bytes) -> bool:
        """Whether the block of `key` is readable here. Not a use, and nothing else: recovery does
        not look for it."""


class News(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one kind that have come, or have gone, one after the other. Python's collector does
    not count it."""

    namespace: str
    group: int
    """That of the keys."""
    tokens: int
    """How many each block holds; 0 where that is not known, and for blocks that have gone."""
    has_come: bool
    keys: list[bytes]
    hashes: list[int]
    """`hash_of` each of the keys: made at once, while these are in the processor's cache."""


def hash_of(key: bytes) -> int:
    """The last eight bytes of the block hash as a number, as vLLM has it in its events."""
    return int.from_bytes(key[-12:-4], "big")


Departed = Callable[[str, bytes], None]
"""Called with the namespace and the key of a block that has left all tiers."""


class Presence:
    """The news of one tenant. One thread."""

    def __init__(
        self, tiers: Sequence[Holder], departed: Departed | None = None, *, is_read: bool = True
    ) -> None:
        """Every one of `tiers` gets a journal. Nothing is readable in them yet. `departed` is
        called without news as well."""
        self.news: list[News] = []
        """Since the last `take`; for the journals and for tests."""
        self.is_read = is_read
        """Whether there are news. They are kept until they are taken."""
        self.departed = departed
        for tier in tiers:
            others = tuple(other for other in tiers if other is not tier)
            tier.report_to(Journal(self, others))

    def take(self) -> list[News]:
        """The news since the last call."""
        taken = self.news[:]
        self.news.clear()
        return taken


class Journal:
    """What one tier reports, after its own index has changed."""

    __slots__ = ("_others", "_presence")

    def __init__(self, presence: Presence, others: tuple[Holder, ...]) -> None:
        self._presence = presence
        self._others = others

    def came(self, blocks: Iterable[Held]) -> None:
        """`blocks` are readable here, and no block of their keys was before."""
        if self._presence.is_read:
            self._report(blocks, has_come=True)

    def went(self, blocks: Iterable[Held]) -> None:
        """`blocks` are not readable here any more, and nor is another block of their keys."""
        self._report(blocks, has_come=False)

    def _report(self, blocks: Iterable[Held], *, has_come: bool) -> None:
        others, news = self._others, self._presence.news
        departed = None if has_come else self._presence.departed
        last, kind = news[-1] if news else None, b""
        for one in blocks:
            namespace, key = one.namespace, one.key
            if others and any(other.has(namespace, key) for other in others):
                continue
            if departed is not None:
                departed(namespace, key)
                if not self._presence.is_read:
                    continue
            tokens = one.chain.tokens if has_come else 0
            if (
                last is None or key[-4:] != kind or tokens != last.tokens
                or last.has_come is not has_come or namespace != last.namespace
            ):  # fmt: skip
                kind = key[-4:]
                last = News(namespace, int.from_bytes(kind, "big"), tokens, has_come, [], [])
                news.append(last)
            last.keys.append(key)
            last.hashes.append(hash_of(key))
