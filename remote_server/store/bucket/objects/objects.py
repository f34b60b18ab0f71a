"""The interface of an object store, and the reasons for which its calls fail."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum, auto
from typing import NamedTuple, TypeAlias

LIST_CHUNK = 1000

Body: TypeAlias = "memoryview | Sequence[bytes | memoryview]"
"""An object's bytes, whole or in pieces. They are read where they are."""


class Failure(StrEnum):
    """Why a call of the object store failed."""

    ABSENT = auto()  # there is no such object
    FORBIDDEN = auto()  # the credential is missing, expired or may not do this
    THROTTLED = auto()  # too many requests: 429 or 503
    TIMEOUT = auto()
    UNREACHABLE = auto()  # no connection
    SHORT = auto()  # fewer bytes than the object should have
    LOST = auto()  # the process of the call has died, or the call hung in it
    OTHER = auto()


class BucketError(Exception):
    """A call that failed, its reason, and the words of the store."""

    def __init__(self, failure: Failure, words: str) -> None:
        super().__init__(words)
        self.failure = failure


class Listed(NamedTuple):
    """An object as a list shows it. Its age is by the clock of the store."""

    name: str
    num_bytes: int
    modified: float


class Head(NamedTuple):
    """The beginning of an object."""

    data: memoryview
    num_bytes: int  # of the whole object
    modified: float  # seconds since 1970, by the clock of the store


class Objects(ABC):
    """The objects of one bucket below a prefix. Any thread may call it; every call blocks, and
    raises `BucketError`."""

    url: str

    @abstractmethod
    def put(self, name: str, data: Body, *, create: bool = True) -> bool:
        """Store `data`, which may be in pieces, as `name`, whole or not at all. With `create` an
        object that is there stays, and the result is False."""

    @abstractmethod
    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        """The bytes from `begin` to `end`. A store returns fewer where the object ends: with
        `all_of_it` that is `SHORT`."""

    @contextmanager
    def reading(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        """All of the bytes from `begin` to `end`, which are the caller's until it leaves."""
        yield self.read(name, begin, end)

    @abstractmethod
    def read_head(self, name: str, num_bytes: int) -> Head:
        """The first `num_bytes` of an object, or all of a shorter one."""

    def time(self, name: str) -> float:
        """The store's clock, in seconds since 1970: that of `name`, which is written for it."""
        self.put(name, memoryview(b"now"), create=False)
        return self.read_head(name, 3).modified

    @abstractmethod
    def size_of(self, name: str) -> int | None:
        """The size of an object, or None when it is not there."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are gone already are no error."""

    @abstractmethod
    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        """All objects below `prefix`, in chunks of up to `LIST_CHUNK`."""

    @abstractmethod
    def folders(self, prefix: str) -> list[str]:
        """The folders directly below `prefix`."""

    @abstractmethod
    def remove_unfinished(self, prefix: str, before: float) -> None:
        """Remove what writes of killed servers to a folder have left below `prefix`, if it was last
        changed `before` this time. No list shows such files. Other stores have none."""

    def close(self) -> None:
        """Calls under way and later ones may fail."""
        return None
