"""Names under which a benchmark can be run: its own, its module's, and a source document's script.

The scripts of the source documents stand in `benchmarks/sources/scripts.toml`.
"""

import difflib
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.commands import registry

SCRIPTS = registry.REPOSITORY / "benchmarks" / "sources" / "scripts.toml"

_MOST_SIMILAR = 5
_SIMILAR_ENOUGH = 0.5


def scripts(path: Path = SCRIPTS) -> dict[str, list[str]]:
    """By file name: the module that does the same, and the arguments that choose it there."""
    by_document = tomllib.loads(path.read_text())
    return {
        name: shlex.split(command)
        for commands in by_document.values() for name, command in commands.items()
    }  # fmt: skip


def command_of(name: str) -> list[str]:
    """A module and its first arguments, for `python -m`.

    `name` may be a path or a dotted module; its last part counts. Raises `LookupError`, with the
    names that are similar, where there is no such benchmark or script.
    """
    benchmarks, of_sources = registry.find(), scripts()
    file = name.rpartition("/")[2]
    if file in of_sources:
        return of_sources[file]
    own = file.removesuffix(".py").rpartition(".")[2]
    if own in benchmarks:
        return [benchmarks[own].module]
    raise LookupError(_unknown(name, own, [*benchmarks, *of_sources]))


def _unknown(name: str, own: str, known: Sequence[str]) -> str:
    similar = [each for each in known if own and own in each]
    similar += difflib.get_close_matches(own, known, _MOST_SIMILAR, _SIMILAR_ENOUGH)
    similar = [*dict.fromkeys(similar)][:_MOST_SIMILAR]
    if similar:
        near = f"similar: {', '.join(similar)}; `python -m benchmarks list` shows all"
    else:
        near = f"there are {', '.join(known)}"
    return f"there is no benchmark {name}; {near}"
