"""The rooms: the folders of the packages in the order of their imports, and each one's imports.

    python .ci/rooms.py [ROOT] [--svg PATH]    exits 1 at an arrow that runs back

Imports for types count. The order is computed: a folder comes behind all that it imports. Where
none can, folders import each other in a circle: `!` marks the arrows whose ends would open it, with
the fewest files. A folder with folders inside is there twice if its files are above and below
those: `folder:base` has the files that import none of them.
"""

import argparse
import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import fill

PACKAGES = ("remote_server", "kv_connector")
DEPTH = 3  # as `remote_server/client/lanes`
MOST = 12  # rooms in a circle; a larger one is in the order of names

Arrows = dict[str, dict[str, set[str]]]  # by room, the rooms that it imports, and its files that do


def imports_of(root: Path) -> dict[Path, set[Path]]:
    """By file of the packages, the files of theirs that it imports."""
    files = {each.relative_to(root) for name in PACKAGES for each in (root / name).rglob("*.py")}
    modules = {".".join(f.with_suffix("").parts).removesuffix(".__init__"): f for f in files}
    found = {}
    for file in files:
        names = _names(ast.parse((root / file).read_text()))
        targets = (modules.get(name) or modules.get(name.rpartition(".")[0]) for name in names)
        found[file] = {target for target in targets if target}
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (start + alias.name for alias in node.names)


def rooms_of(imports: dict[Path, set[Path]]) -> dict[Path, str]:
    """The room of each file."""
    folders = {file: "/".join(file.parent.parts[:DEPTH]) for file in imports}
    beside = {f: {t for t in imports[f] if folders[t] == folders[f]} for f in imports}
    above = {f for f in imports for t in imports[f] if folders[t].startswith(f"{folders[f]}/")}
    while more := {file for file in imports.keys() - above if beside[file] & above}:
        above |= more
    split = {folders[file] for file in above}
    based = {file for file in imports if folders[file] in split} - above
    return {file: f"{folders[file]}{':base' * (file in based)}" for file in imports}


def arrows_of(imports: dict[Path, set[Path]]) -> Arrows:
    rooms = rooms_of(imports)
    arrows: Arrows = {room: defaultdict(set) for room in rooms.values()}
    for file, targets in imports.items():
        for to in targets:
            if rooms[to] != rooms[file]:
                arrows[rooms[file]][rooms[to]].add(str(file))
    return arrows


def order_of(arrows: Arrows) -> list[str]:
    """Each room behind those that it imports, and after one of the same folder if it can be."""
    order: list[str] = []

    def rank(room: str) -> tuple[int, int, bool, str]:
        package, _, inside = room.replace(":", "/").partition("/")
        is_far = not order or not order[-1].startswith(f"{package}/{inside.partition('/')[0]}")
        return len(reached(room)), PACKAGES.index(package), is_far, room

    def reached(room: str) -> set[str]:
        found, new = {room}, {room}
        while new:
            new = {to for each in new for to in arrows[each].keys() & left} - found
            found |= new
        return found

    @cache
    def fewest_back(circle: frozenset[str]) -> tuple[int, list[str]]:
        tails = {room: fewest_back(circle - {room}) for room in circle}
        files = {room: sum(len(arrows[room].get(to, ())) for to in circle) for room in circle}
        ways = ((files[room] + tail[0], [room, *tail[1]]) for room, tail in tails.items())
        return min(ways, default=(0, []))

    while left := arrows.keys() - {*order}:
        circle = reached(min(left, key=rank))  # of a room that reaches fewest: often it alone
        order += fewest_back(frozenset(circle))[1] if len(circle) <= MOST else sorted(circle)
    return order


def main() -> int:
    parser = argparse.ArgumentParser(description="The folders of the packages, in import order.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--svg", type=Path, help="draw them there")
    flags = parser.parse_args()
    arrows = arrows_of(imports_of(flags.root))
    order = order_of(arrows)
    num_back = 0
    for number, room in enumerate(order):
        back = [to for to in order[number:] if to in arrows[room]]
        num_back += len(back)
        print(room, *(f"  ! {to}: {', '.join(sorted(arrows[room][to]))}" for to in back), sep="\n")
        ahead = ", ".join(to for to in order[:number] if to in arrows[room])
        print(fill(ahead or "nothing", 100, initial_indent="    ", subsequent_indent="    "))
    print(f"{len(order)} rooms, {sum(map(len, arrows.values()))} arrows, {num_back} run back")
    if flags.svg:
        from rooms_drawing import drawing_of  # beside this file

        flags.svg.write_text(drawing_of(arrows, order))
    return 1 if num_back else 0


if __name__ == "__main__":
    sys.exit(main())
