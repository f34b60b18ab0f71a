"""A check of prose: retired words in docstrings, comments and documents, and modules' first words.

    python .ci/prose.py [PATH …]    the project, or these files and folders; exits 1 at a finding

CONTRIBUTING.md has the rules of prose; this checks those that a machine can check.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATHS = ("kv_connector", "remote_server", "benchmarks", "examples", "tests", ".ci", "docs")

INSTEAD_OF = {
    r"nobody|anybody|somebody|everybody": "name the thing: no client, another tenant, every thread",
    r"whoever|whomever|whosoever": "name the thing that does it",
    r"tells?|told|says?|said|heard": "things send, record, return, report, log, print, state",
    r"farewell|bids?|lies|thereof|therein": "use the field's word",
    r"is but|are but": "use `only`",
}
"""Retired words, as patterns, and their replacements."""

FIRST_WORDS = {"what", "who", "how", "where", "when", "why", "which", "whether", "whose", "as"}
"""A module's docstring begins with a noun phrase that names its job, not with one of these."""

Line = tuple[int, str]


def docstrings_of(tree: ast.Module) -> Iterator[Line]:
    """The lines of every string that is a statement of its own, with their numbers."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for number, line in enumerate(text.splitlines()):
                    yield node.lineno + number, line


def comments_of(source: str) -> Iterator[Line]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def prose_of_python(source: str) -> Iterator[Line]:
    yield from docstrings_of(ast.parse(source))
    yield from comments_of(source)


def prose_of_markdown(source: str) -> Iterator[Line]:
    """The lines outside of code blocks."""
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, line


def retired_words(lines: Iterator[Line]) -> Iterator[tuple[int, str]]:
    for number, line in lines:
        line = re.sub(r"`[^`]*`|\"[^\"]*\"", "", line)  # code and quotations are not our words
        for words, instead in INSTEAD_OF.items():
            if found := re.search(rf"\b({words})\b", line, re.IGNORECASE):
                yield number, f"'{found[0]}': {instead}"


def findings_in(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text()
    if path.suffix == ".md":
        yield from retired_words(prose_of_markdown(source))
        return
    yield from retired_words(prose_of_python(source))
    docstring = ast.get_docstring(ast.parse(source)) or ""
    first = docstring.split(maxsplit=1)[:1]
    if first and first[0].lower().strip(",:") in FIRST_WORDS and path.parts[0] != "tests":
        yield 1, f"'{first[0]}': a module's docstring begins with a noun phrase"


def files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for suffix in ("*.py", "*.md"):
        yield from sorted(path.rglob(suffix))


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [
        *Path().glob("*.md"), *map(Path, PATHS)
    ]  # fmt: skip
    count = 0
    for path in (file for start in paths for file in files_of(start)):
        for number, finding in findings_in(path):
            print(f"{path}:{number}: {finding}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
