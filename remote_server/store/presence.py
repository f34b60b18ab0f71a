"""News of a store: the blocks that became readable, and those that have left all of its tiers.

Each tier reports what enters and leaves its own index. A block that another tier has as well has
neither come nor gone. So each block of the news has come once since it last went, and a reader of
all news knows what the server holds.
"""

from collections.abc import Iterable, Sequence
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
    """A block has come, or has gone. Python's collector does not count it: a put has thousands."""

    namespace: str
    key: bytes
    tokens: int
    """How many it holds; 0 where that is not known, and for a block that has gone."""
    has_come: bool


class Presence:
    """The news of one tenant. One thread."""

    def __init__(self, tiers: Sequence[Holder]) -> None:
        """Every one of `tiers` gets a journal. Nothing is readable in them yet."""
        self.news: list[News] = []
        """Since the last `take`; for the journals and for tests."""
        for tier in tiers:
            others = tuple(other for other in tiers if other is not tier)
            tier.report_to(Journal(self.news, others))

    def take(self) -> list[News]:
        """The news since the last call."""
        taken = self.news[:]
        self.news.clear()
        return taken


class Journal:
    """What one tier reports, after its own index has changed."""

    __slots__ = ("_news", "_others")

    def __init__(self, news: list[News], others: tuple[Holder, ...]) -> None:
        self._news = news
        self._others = others

    def came(self, blocks: Iterable[Held]) -> None:
        """`blocks` are readable here, and no block of their keys was before."""
        if self._others:
            blocks = self._only_here(blocks)
        self._news += [News(one.namespace, one.key, one.chain.tokens, True) for one in blocks]

    def went(self, blocks: Iterable[Held]) -> None:
        """`blocks` are not readable here any more, and nor is another block of their keys."""
        if self._others:
            blocks = self._only_here(blocks)
        self._news += [News(one.namespace, one.key, 0, False) for one in blocks]

    def _only_here(self, blocks: Iterable[Held]) -> list[Held]:
        """Those that no other tier has."""
        others = self._others
        return [
            one for one in blocks
            if not any(other.has(one.namespace, one.key) for other in others)
        ]  # fmt: skip
