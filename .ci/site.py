"""The documentation site: `make site`, in build/site. Exits 1 at a link that leads nowhere.

    python .ci/site.py [FOLDER]     the site, in build/site or in that folder

mkdocs builds it. Its pages lie in one folder, so this copies every document of the repository, and
every file that one links to, below build/site-src in the places that they have here. The same
Markdown is read in a repository browser.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "build" / "site-src"
CONFIG = ROOT / "docs" / "mkdocs.yml"

LINK = re.compile(r"\]\(([^)#\s]+)")


def pages() -> list[Path]:
    """Every document that git has, relative to the root. Those of tests are for contributors."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [Path(name) for name in listed.stdout.split() if not name.startswith("tests/")]


def linked_from(page: Path) -> Iterator[Path]:
    """The files that a page links to, as far as they are here."""
    for target in LINK.findall((ROOT / page).read_text()):
        if "://" not in target:
            file = (ROOT / page.parent / target).resolve()
            if file.is_file() and file.is_relative_to(ROOT):
                yield file.relative_to(ROOT)


def gather() -> None:
    shutil.rmtree(SOURCES, ignore_errors=True)
    found = pages()
    for file in {*found, *(linked for page in found for linked in linked_from(page))}:
        (SOURCES / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, SOURCES / file)


def main(arguments: list[str]) -> int:
    gather()
    folder = Path(arguments[0] if arguments else ROOT / "build" / "site").resolve()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    built = subprocess.run(
        [*command, "-f", str(CONFIG), "-d", str(folder)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    if built.returncode:
        print("\n".join(line for line in built.stderr.splitlines() if not line.startswith("INFO")))
    else:
        print(f"site: {folder / 'index.html'}")
    return built.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
