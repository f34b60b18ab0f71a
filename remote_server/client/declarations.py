"""Namespaces that a client declares, and the standing of each with the connected server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from remote_server.errors import LocalProtocolError


class Standing(Enum):
    """The standing of one namespace with the connected server."""

    DUE = auto()  # a hello must be sent
    ASKED = auto()  # a hello is on its way
    WELCOME = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Declaration:
    namespace: str
    block_bytes: int
    fingerprint: Mapping[str, str]
    standing: Standing = Standing.DUE
    retry_at: float = inf
    refusal: str = ""

    @property
    def is_welcome(self) -> bool:
        return self.standing is Standing.WELCOME


class Declarations:
    """Every namespace that was declared and not forgotten, by name."""

    def __init__(self) -> None:
        self._declared: dict[str, Declaration] = {}

    def __len__(self) -> int:
        return len(self._declared)

    def __iter__(self) -> Iterator[Declaration]:
        return iter(self._declared.values())

    def __getitem__(self, namespace: str) -> Declaration:
        """Raises `LocalProtocolError` when `namespace` was never declared."""
        try:
            return self._declared[namespace]
        except (KeyError, TypeError):
            raise LocalProtocolError(f"namespace {namespace!r} was not declared") from None

    def get(self, namespace: str) -> Declaration | None:
        return self._declared.get(namespace)

    def add(self, namespace: str, block_bytes: int, fingerprint: Mapping[str, str]) -> bool:
        """Add a namespace. False when it was declared with the same values before."""
        known = self._declared.get(namespace)
        if known and (known.block_bytes, known.fingerprint) == (block_bytes, fingerprint):
            return False
        self._declared[namespace] = Declaration(namespace, block_bytes, fingerprint)
        return True

    def remove(self, namespace: str) -> bool:
        """Remove a namespace. False when it was not declared."""
        return self._declared.pop(namespace, None) is not None

    def start_over(self) -> None:
        """Make a hello due for every namespace."""
        for declaration in self:
            declaration.standing, declaration.retry_at = Standing.DUE, inf

    def due(self, now: float) -> list[Declaration]:
        """The declarations whose hello is due, those refused long enough ago included."""
        declared = self._declared.values()
        for declaration in declared:
            if declaration.retry_at <= now:
                declaration.standing, declaration.retry_at = Standing.DUE, inf
        return [declaration for declaration in declared if declaration.standing is Standing.DUE]

    @property
    def retry_at(self) -> float:
        """Time at which the next refused namespace becomes due."""
        return min((declaration.retry_at for declaration in self._declared.values()), default=inf)
