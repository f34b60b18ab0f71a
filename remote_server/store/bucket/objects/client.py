"""The client of the object store, obstore: blocking calls with bounds on time.

An error becomes one of a few reasons.
"""

import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from remote_server.errors import ConfigError
from remote_server.plain_text import without_secrets
from remote_server.store.bucket.objects.objects import (
    LIST_CHUNK,
    Body,
    BucketError,
    Failure,
    Head,
    Listed,
    Objects,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

log = logging.getLogger(__name__)

SCHEMES = ("s3", "gs", "az", "azure", "file", "memory")

# The defaults of obstore wait for minutes. A frozen store costs one read this time twice.
CONNECT_TIMEOUT = timedelta(milliseconds=500)
READ_TIMEOUT = timedelta(seconds=2)
CALL_TIMEOUT = timedelta(seconds=15)
MAX_RETRIES = 1

MOST_AHEAD_S = 3600.0
"""Dates of a store that are farther ahead of this machine's clock are not believed: with one wrong
date, of a proxy perhaps, all packs would look too old, and a sweep would remove them. Where it is
this machine's clock that is behind, packs look younger than they are."""


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

        with _calling(absent=Failure.OTHER):
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
        return True

    def read(self, name: str, begin: int, end: int, *, all_of_it: bool = True) -> memoryview:
        import obstore

        with _calling():
            data = memoryview(obstore.get_range(self._store, name, start=begin, end=end))
        if all_of_it and data.nbytes != end - begin:
            raise BucketError(Failure.SHORT, f"{data.nbytes} of {end - begin} bytes of {name}")
        return data

    def read_head(self, name: str, num_bytes: int) -> Head:
        import obstore

        with _calling():
            result = obstore.get(self._store, name, options={"range": (0, num_bytes)})
            meta = result.meta
            data = memoryview(result.bytes())
        return Head(data, int(meta["size"]), _date_of(meta))

    def size_of(self, name: str) -> int | None:
        import obstore

        try:
            with _calling():
                return int(obstore.head(self._store, name)["size"])
        except BucketError as error:
            if error.failure is Failure.ABSENT:
                return None
            raise

    def remove(self, names: Sequence[str]) -> None:
        import obstore

        if not names:
            return
        try:
            with _calling():
                obstore.delete(self._store, [*names])
        except BucketError as error:
            if error.failure is not Failure.ABSENT:
                raise
            # A folder ends at the first file that is gone: the others are still there.
            for name in names if len(names) > 1 else ():
                self.remove([name])

    def listing(self, prefix: str) -> Iterator[Sequence[Listed]]:
        import obstore

        with _calling(absent=Failure.OTHER):
            for chunk in obstore.list(self._store, prefix, chunk_size=LIST_CHUNK):
                yield [Listed(m["path"], int(m["size"]), _date_of(m)) for m in chunk]

    def folders(self, prefix: str) -> list[str]:
        import obstore

        with _calling(absent=Failure.OTHER):
            return [*obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]]

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


@contextmanager
def _calling(*, absent: Failure = Failure.ABSENT) -> Iterator[None]:
    """Raise what a call raises as `BucketError`. `absent` is the reason of a 404: where no object
    is asked for, the bucket is missing."""
    try:
        yield
    except BucketError:
        raise
    except Exception as error:
        failure = _reason(error)
        failure = absent if failure is Failure.ABSENT else failure
        raise BucketError(failure, _words(error)) from error


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
