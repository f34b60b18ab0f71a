"""Sockets of a test's scripted clients, which are closed when the test ends.

Without an owner a socket ends when the garbage collector finds it, and its warning fails the test
that happens to run then. A test that fails closes nothing itself.
"""

from collections.abc import Iterator
from typing import Protocol, TypeVar

import pytest


class Closable(Protocol):
    def close(self) -> object:
        """May be called again."""


One = TypeVar("One", bound=Closable)

_to_tests: list[Closable] = []
_to_fixtures: list[Closable] = []


def lent(one: One, *, to_fixtures: bool = False) -> One:
    """`one`, which stays open until the test ends; `to_fixtures`: until those of the test end."""
    (_to_fixtures if to_fixtures else _to_tests).append(one)
    return one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    _close_all(_to_tests)
    try:
        return (yield)
    finally:
        _close_all(_to_fixtures)


def _close_all(all_lent: list[Closable]) -> None:
    while all_lent:
        all_lent.pop().close()
