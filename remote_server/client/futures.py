"""The end of a future, on the I/O thread: whatever its callbacks do, the thread goes on."""

import logging
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def resolve(future: "Future[T]", result: T) -> None:
    """End `future` with `result`."""
    try:
        future.set_result(result)
    except BaseException:
        _log()


def fail(future: "Future[T]", error: Exception) -> None:
    """End `future` with `error`."""
    try:
        future.set_exception(error)
    except BaseException:
        _log()


def _log() -> None:
    # The future has ended: `concurrent.futures` logs what a callback raises, but for SystemExit and
    # its like. That would end the I/O thread, and every other future would stay open.
    logger.exception("client: a callback of a request raised what ends a thread")
