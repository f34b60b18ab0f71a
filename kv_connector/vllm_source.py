"""Search for names in the source of a vLLM, without importing it.

An import takes seconds, needs torch, and ends at the first missing name; the source shows all of
them. It may be of another version than the one that runs, such as an unpacked wheel.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

_MOST_STEPS = 16
"""Imports followed for one name, and classes for one member: a cycle ends here."""


class Missing(NamedTuple):
    """A name that a version lacks: a module, a class or a member, written in full."""

    name: str
    used_for: str


def missing_names(package: Path, names: Mapping[str, Mapping[str, str]]) -> list[Missing]:
    """Those of `names` (written as in `vllm_names`) that the package in folder `package` lacks.

    A missing module or class is listed once, for everything in it.
    """
    source = _Source(package)
    found: dict[str, Missing] = {}
    for module, members in names.items():
        for name, used_for in members.items():
            if (lacking := source.lacking(module, name)) is not None:
                found.setdefault(lacking, Missing(lacking, used_for))
    return [*found.values()]


class _Source:
    """The modules of one package, each parsed at its first use."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._modules: dict[str, dict[str, ast.stmt] | None] = {}

    def lacking(self, module: str, name: str) -> str | None:
        """The first missing part of `name` in `module`, in full; None if nothing is missing."""
        if self._names_of(module) is None:
            return module
        cls, _, member = name.partition(".")
        defined = self._find(module, cls)
        if defined is None:
            return f"{module}.{cls}"
        if not member or self._has(*defined, member):
            return None
        return f"{module}.{name}"

    def _names_of(self, module: str) -> dict[str, ast.stmt] | None:
        """The definitions and imports of a module, by name; None without such a module."""
        if module not in self._modules:
            path = self._package.joinpath(*module.split(".")[1:])
            files = [path.parent / f"{path.name}.py", path / "__init__.py"]
            file = next((file for file in files if file.is_file()), None)
            self._modules[module] = None if file is None else dict(_names(_parsed(file)))
        return self._modules[module]

    def _find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """The statement that defines `name`, and its module; imports are followed."""
        for _ in range(_MOST_STEPS):
            statement = (self._names_of(module) or {}).get(name)
            if statement is None:
                return None
            if not isinstance(statement, ast.ImportFrom):
                return module, statement
            target = self._target(module, statement)
            if target.partition(".")[0] != self._package.name:
                return module, statement  # another package's
            module, name = target, _original(statement, name)
        return None

    def _target(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that an import names, in full."""
        if not statement.level:
            return statement.module or ""
        path = self._package.joinpath(*module.split(".")[1:])
        up = statement.level - (1 if path.is_dir() else 0)
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [statement.module])])

    def _has(self, module: str, statement: ast.stmt, member: str) -> bool:
        """Whether a class or one of its bases has `member`, which may be `method(parameter)`.

        True for a statement that is not a class: its members cannot be found in the source.
        """
        name, _, parameter = member.rstrip(")").partition("(")
        waiting = [(module, statement)]
        for _ in range(_MOST_STEPS):
            if not waiting:
                return False
            module, statement = waiting.pop(0)
            if not isinstance(statement, ast.ClassDef):
                return True
            own = _member(statement, name)
            if own is not None:
                return not parameter or _takes(own, parameter)
            bases = [self._find(module, base) for base in _bases(statement)]
            waiting += [base for base in bases if base and isinstance(base[1], ast.ClassDef)]
        return False


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _names(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every name at module level, also under `if` and `try`."""
    for statement in _statements(module.body):
        match statement:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name, statement
            case ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, statement) for alias in names)
            case _:
                yield from ((name, statement) for name in _assigned(statement))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            handlers = statement.handlers if isinstance(statement, ast.Try) else []
            inside = (statement.body, statement.orelse, *(handler.body for handler in handlers))
            yield from _statements(chain(*inside))


def _assigned(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement sets."""
    match statement:
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _set_on_self(method: ast.stmt) -> Iterator[str]:
    for node in ast.walk(method):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                yield attr


def _original(statement: ast.ImportFrom, name: str) -> str:
    return next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)


def _bases(statement: ast.ClassDef) -> Iterator[str]:
    for base in statement.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(plain, ast.Name):
            yield plain.id


def _member(statement: ast.ClassDef, name: str) -> ast.stmt | None:
    """The statement of the class itself that defines `name`: in its body, or on `self`."""
    for inside in _statements(statement.body):
        if isinstance(inside, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if inside.name == name or name in _set_on_self(inside):
                return inside
        elif name in _assigned(inside):
            return inside
    return None


def _takes(method: ast.stmt, parameter: str) -> bool:
    if not isinstance(method, ast.FunctionDef):
        return True
    given = method.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return parameter in names or given.kwarg is not None
