"""A registry of the tree: every benchmark of this project, and every source document.

A benchmark is a file named `test_….py`, or a package with a `__main__.py`. Its name is that of the
file or package, and the first line of its docstring is the question that it answers. A document
is a module of `benchmarks.sources`.
"""

import ast
import importlib
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.source import Document

REPOSITORY = Path(__file__).resolve().parents[3]


class Benchmark(NamedTuple):
    """A benchmark; `python -m MODULE` runs it."""

    name: str
    module: str
    question: str


def find(root: Path = REPOSITORY) -> dict[str, Benchmark]:
    """By name, in the order of their modules. Nothing is imported: that would load torch.

    Raises `LookupError` when two have one name, or one has no question.
    """
    found: dict[str, Benchmark] = {}
    for file in sorted((root / "benchmarks").rglob("*.py")):
        is_package = file.name == "__main__.py" and file.parent != root / "benchmarks"
        if not (is_package or file.name.startswith("test_")):
            continue
        path = file.parent if is_package else file.with_suffix("")
        module = ".".join(path.relative_to(root).parts)
        if path.name in found:
            raise LookupError(f"{path.name} is both {found[path.name].module} and {module}")
        found[path.name] = Benchmark(path.name, module, _question(file))
    return found


def question_of(module: str, root: Path = REPOSITORY) -> str:
    """The question of a module outside of `benchmarks` that also writes records; "" when it has
    none or no longer exists."""
    file = root / f"{module.replace('.', '/')}.py"
    if not file.exists():
        return ""
    asked, mark, _ = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("?")
    return asked + mark if "\n" not in asked else ""


def _question(file: Path) -> str:
    """A package may have its question in `__init__.py`, and the command in `__main__.py`."""
    lines = []
    for each in (file, file.parent / "__init__.py") if file.name == "__main__.py" else (file,):
        if each.exists():
            text = ast.get_docstring(ast.parse(each.read_text())) or ""
            lines.append(text.partition("\n")[0])
    for line in lines:
        if line.endswith("?"):
            return line
    raise LookupError(f"{file}: no docstring that begins with the question it answers")


def documents() -> list[Document]:
    """The sources' documents, in the order of their modules' names."""
    return [*documents_by_name().values()]


def documents_by_name() -> dict[str, Document]:
    """`DOCUMENT` of each module of `benchmarks.sources`, by the module's name, in order.

    These modules are imported; a test proves that they load nothing heavy.
    """
    names = sorted(file.stem for file in (REPOSITORY / "benchmarks" / "sources").glob("[!_]*.py"))
    return {name: importlib.import_module(f"benchmarks.sources.{name}").DOCUMENT for name in names}
