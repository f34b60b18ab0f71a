"""The object store behind the bucket tier, through obstore: blocking calls with bounds on time.

Each call runs on a thread of the tier. An error becomes one of a few reasons; which calls are made
at all while the store is away is the decision of `Availability`.
"""

import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from remote_server.errors import ConfigError
from remote_server.plain_text import without_secrets

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

log = logging.getLogger(__name__)

SCHEMES = ("s3", "gs", "az", "azure", "file", "memory")

# The defaults of obstore wait for minutes. A frozen store costs one read this time twice.
CONNECT_TIMEOUT = timedelta(milliseconds=500)
READ_TIMEOUT = timedelta(seconds=2)
CALL_TIMEOUT = timedelta(seconds=15)
MAX_RETRIES = 1

LIST_CHUNK = 1000

MOST_AHEAD_S = 3600.0
"""Dates of a store that are farther ahead of this machine's clock are not believed: with one wrong
date, of a proxy perhaps, all packs would look too old, and a sweep would remove them. Where it is
this machine's clock that is behind, packs look younger than they are."""

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


class StoreObjects(Objects):
    """`Objects` whose calls are made in this process, which an answer of a store can end: the
    client takes as much memory as an answer has by its own words. A server uses `ProcessObjects`.
    """

    def __init__(self, url: str, *, make: bool = True) -> None:
        """`url` is as in `s3://bucket/prefix`. Credentials and endpoints come from the environment,
        under the names that each store documents. Without `make` the folder of a `file://` must
        exist. Raises `ConfigError`."""
        self.url = url
        self._store = open_store(url, make=make)

    def put(self, name: str, data: Body, *, create: bool = True) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(
                self._store, name, data if isinstance(data, memoryview) else iter(data),
                mode="create" if create else "overwrite",
                use_multipart=False,
            )  # fmt: skip
        except AlreadyExistsError as error:
            # Of Azure any 409 is this error, also that of a full account.
            if create and self.size_of(name) is not None:
                return False
            raise BucketError(Failure.OTHER, _words(error)) from error
        except Exception as error:
            raise _failed(error, absent=Failure.OTHER) from error
        return True

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        import obstore

        try:
            data = memoryview(obstore.get_range(self._store, name, start=begin, end=end))
        except Exception as error:
            raise _failed(error) from error
        if all_of_it and data.nbytes != end - begin:
            raise BucketError(Failure.SHORT, f"{data.nbytes} of {end - begin} bytes of {name}")
        return data

    def read_head(self, name: str, num_bytes: int) -> Head:
        import obstore

        try:
            result = obstore.get(self._store, name, options={"range": (0, num_bytes)})
            meta = result.meta
            data = memoryview(result.bytes())
        except Exception as error:
            raise _failed(error) from error
        return Head(data, int(meta["size"]), _date_of(meta))

    def size_of(self, name: str) -> int | None:
        import obstore

        try:
            return int(obstore.head(self._store, name)["size"])
        except Exception as error:
            failed = _failed(error)
            if failed.failure is Failure.ABSENT:
                return None
            raise failed from error

    def remove(self, names: Sequence[str]) -> None:
        import obstore

        if not names:
            return
        try:
            obstore.delete(self._store, [*names])
        except Exception as error:
            failed = _failed(error)
            if failed.failure is not Failure.ABSENT:
                raise failed from error
            # A folder ends at the first file that is gone: the others are still there.
            for name in names if len(names) > 1 else ():
                self.remove([name])

    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        import obstore

        try:
            for chunk in obstore.list(self._store, prefix, chunk_size=LIST_CHUNK):
                yield [Listed(m["path"], int(m["size"]), _date_of(m)) for m in chunk]
        except Exception as error:
            raise _failed(error, absent=Failure.OTHER) from error

    def folders(self, prefix: str) -> list[str]:
        import obstore

        try:
            return [*obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]]
        except Exception as error:
            raise _failed(error, absent=Failure.OTHER) from error

    def remove_unfinished(self, prefix: str, before: float) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "file":
            return
        for path in Path(parts.path, prefix).rglob("*#*"):
            with suppress(OSError):  # gone meanwhile
                if _UNFINISHED.search(path.name) and path.stat().st_mtime < before:
                    path.unlink()


# obstore's names of files that are being written.
_UNFINISHED = re.compile(r"#\d+$")


class Availability:
    """Whether the store is called: after failures that concern all objects it is left alone for a
    while, which doubles. The log has a line when that begins, and one when the store is back. One
    thread."""

    FIRST_PAUSE_S = 1.0
    LONGEST_PAUSE_S = 60.0
    THRESHOLD = 3

    def __init__(self, clock: Callable[[], float], url: str = "") -> None:
        """`url` is for the log."""
        self.num_refused = 0
        """Lookups that the store was not called for, because it is left alone."""
        self._clock = clock
        self._url = url
        self._away_since: float | None = None
        self._refused_before = 0
        self._failing: set[Hashable] = set()
        self._pause_s = self.FIRST_PAUSE_S
        self._closed_until = 0.0

    @property
    def is_open(self) -> bool:
        return self._clock() >= self._closed_until

    @property
    def paused_s(self) -> float:
        """For how long it has failed; 0: it is called and answers."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def refuse(self) -> None:
        """A lookup goes on without the store."""
        self.num_refused += 1

    def succeeded(self) -> None:
        """A call went well. One that was begun before a pause does not end it."""
        if not self.is_open:
            return
        if self._away_since is not None:
            log.warning(
                "bucket: %s answers again after %.1f s; %d lookups went on without it",
                self._url, self.paused_s, self.num_refused - self._refused_before,
            )  # fmt: skip
            self._away_since = None
        self._pause_s, self._closed_until = self.FIRST_PAUSE_S, 0.0
        self._failing.clear()

    def failed(self, failure: Failure, of: Hashable = None) -> bool:
        """A call for the object `of`, or for none alone, has failed. True when this began a pause.
        A single object that cannot be read, again and again, begins none."""
        if failure in (Failure.ABSENT, Failure.SHORT):
            return False
        of_all = of is None or failure in (Failure.UNREACHABLE, Failure.TIMEOUT)
        if len(self._failing) < self.THRESHOLD:
            self._failing.add(object() if of_all else of)
        # What is throttled fails for the next call as well.
        at_once = failure is Failure.THROTTLED or (failure is Failure.FORBIDDEN and of is None)
        if not self.is_open or (len(self._failing) < self.THRESHOLD and not at_once):
            return False
        self._closed_until = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self.LONGEST_PAUSE_S)
        if self._away_since is None:
            self._away_since, self._refused_before = self._clock(), self.num_refused
            log.warning("bucket: %s fails (%s): it is left alone for a while, again and again "
                        "until it answers", self._url, failure)  # fmt: skip
        return True


_FORM = "write s3://, gs://, az:// or file:///, a name, a prefix"


def check_url(url: str) -> None:
    """Raise `ConfigError` unless `url` may be a bucket. The message has no secret of it."""
    shown = without_secrets(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"bucket: {shown}: {_FORM}") from None
    if url.startswith("/") or (parts.scheme == "file" and parts.netloc):
        folder = f"/{parts.netloc}{parts.path}" if parts.netloc else parts.path
        raise ConfigError(f"bucket: {shown}: three slashes begin a folder's path: file://{folder}")
    is_named = bool(parts.path.strip("/") if parts.scheme == "file" else parts.netloc)
    if parts.scheme not in SCHEMES or not (is_named or parts.scheme == "memory"):
        raise ConfigError(f"bucket: {shown}: {_FORM}")
    if "@" in parts.netloc or parts.query:
        raise ConfigError(
            f"bucket: {shown}: a credential in an address is not read, and logs would show it: "
            "set the variables of the store, as AWS_ACCESS_KEY_ID"
        )


def open_store(url: str, *, make: bool = True) -> "ObjectStore":
    """The client of `url` with bounds on time. Without `make` a folder must exist. Raises
    `ConfigError`."""
    check_url(url)
    try:
        from obstore.store import LocalStore, MemoryStore, from_url
    except ImportError as error:
        raise ConfigError(
            "bucket: this server has no client for object stores: pip install '.[bucket]'"
        ) from error
    parts = urlsplit(url)
    if parts.scheme == "file" and not make and not Path(parts.path).is_dir():
        raise ConfigError(f"bucket: {url}: there is no such folder")
    try:
        if parts.scheme == "memory":
            return MemoryStore()
        if parts.scheme == "file":
            if not Path(parts.path).is_dir():
                log.warning("bucket: the folder %s is new: is the share mounted?", parts.path)
            return LocalStore(parts.path, mkdir=make)
        return from_url(
            url,
            client_options=_client_options(),
            retry_config={"max_retries": MAX_RETRIES, "retry_timeout": CALL_TIMEOUT},
            **_OPTIONS.get(parts.scheme, {}),
        )
    except Exception as error:
        raise ConfigError(f"bucket: {url}: {_words(error)}") from error


# The variables that name a store other than the provider's own.
_ENDPOINTS = (
    "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL", "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
)  # fmt: skip


def _client_options() -> "ClientConfig":
    """Without encryption only where the endpoint has none. The client follows redirects, and no
    option forbids it: from a store with https:// none leads to http:// at least."""
    options: ClientConfig = {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": CALL_TIMEOUT,
    }
    if any(os.environ.get(name, "").lower().startswith("http://") for name in _ENDPOINTS):
        options["allow_http"] = True
    return options


# A hash of the body is a third of a put's time, and rows have checksums of their own.
_OPTIONS: dict[str, Any] = {"s3": {"config": {"unsigned_payload": "true"}}}


def _date_of(meta: Any) -> float:
    """When an object was written, by the store's clock, in seconds since 1970."""
    written: float = meta["last_modified"].timestamp()
    return min(written, time.time() + MOST_AHEAD_S)


def _failed(error: Exception, absent: Failure = Failure.ABSENT) -> BucketError:
    """`absent` is the reason of a 404: where no object is asked for, the bucket is missing."""
    if isinstance(error, BucketError):
        return error
    failure = _reason(error)
    return BucketError(absent if failure is Failure.ABSENT else failure, _words(error))


def _reason(error: Exception) -> Failure:
    from obstore.exceptions import (
        NotFoundError,
        PermissionDeniedError,
        UnauthenticatedError,
    )

    if isinstance(error, NotFoundError | FileNotFoundError):
        return Failure.ABSENT
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return Failure.FORBIDDEN
    words = str(error)
    status = _STATUS.search(words)
    if status is not None and int(status[1]) in _STATUS_REASONS:
        return _STATUS_REASONS[int(status[1])]
    if _CREDENTIAL.search(words):
        return Failure.FORBIDDEN
    kind = _KIND.search(words)
    if kind is not None:
        return _KIND_REASONS.get(kind[1], Failure.OTHER)
    return Failure.SHORT if _RANGE.search(words) else Failure.OTHER


# The words of an error have the client's own settings in them too, `retry_timeout` among them, and
# its address.
_STATUS = re.compile(r"status code: (\d{3})")
_STATUS_REASONS = {
    401: Failure.FORBIDDEN,
    403: Failure.FORBIDDEN,
    404: Failure.ABSENT,
    408: Failure.TIMEOUT,
    416: Failure.SHORT,  # the object ends before the range begins
    429: Failure.THROTTLED,
    503: Failure.THROTTLED,
}
_CREDENTIAL = re.compile(r"(?i)credential|expired_?token|169\.254\.169\.254")
_KIND = re.compile(r"HttpError \{ kind: (\w+)".replace(" ", r"\s*"))
_KIND_REASONS = {
    "Timeout": Failure.TIMEOUT,
    "Connect": Failure.UNREACHABLE,
    "Interrupted": Failure.UNREACHABLE,  # in the middle of a body: the object may be whole
    "Request": Failure.UNREACHABLE,
}
_RANGE = re.compile(r"(?i)wanted range|range .*invalid|invalid .*range|fill whole buffer")

_CAUSE = re.compile(r'message: "([^"]+)"')
_MARKUP = re.compile(r"<.*", re.DOTALL)
_SAID = re.compile(r"<(?:Code|Message)>([^<]+)<")


def _words(error: Exception) -> str:
    """The words of the store, in one line, without its markup and without secrets, and the cause
    at their end. Where the store has sent its own code and message, these alone."""
    words, _, source = str(error).partition("Debug source:")
    cause = _CAUSE.search(source)
    parts = [_MARKUP.sub("", words), *_SAID.findall(words), *([cause[1]] if cause else [])]
    if sent := _SAID.findall(words):
        parts = [": ".join(sent)]
    return without_secrets(re.sub(r"\s+", " ", " ".join(parts)).strip())[:400]
