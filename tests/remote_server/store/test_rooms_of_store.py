"""Imports between the rooms of the store go one way, and between those of the bucket."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

STORE = Path(__file__).resolve().parents[3] / "remote_server" / "store"


class Rooms(NamedTuple):
    """The rooms of a folder, each with those below it, and the files that all rooms may import.
    Any other file beside the rooms stands above them, but for those of `above`."""

    folder: Path
    below: dict[str, set[str]]
    common: set[str]
    above: dict[str, set[str]]


OF_STORE = Rooms(
    STORE,
    {
        "eviction": set(),
        "curve": {"eviction"},
        "memory": {"eviction"},
        "disk": {"eviction"},
        "stack": {"eviction", "curve", "memory"},
        "bucket": {"memory", "stack"},
    },
    {"__init__", "chains", "io_threads", "pages", "presence", "tier", "use_times"},
    {},
)
OF_BUCKET = Rooms(
    STORE / "bucket",
    {
        "packs": set(),
        "objects": {"packs"},
        "index": {"packs", "objects"},
        "transfers": {"packs", "objects", "index"},
        "upkeep": {"packs", "objects", "index", "transfers"},
        "down": {"packs", "objects", "index", "transfers", "upkeep"},
    },
    {"__init__"},
    {"down": {"tier"}},
)
CASES = [(rooms, room) for rooms in (OF_STORE, OF_BUCKET) for room in rooms.below]


def imported(folder: Path, files: Iterator[Path]) -> set[str]:
    """The rooms of `folder`, and the files beside them, that `files` import."""
    base = ".".join(folder.relative_to(STORE.parent.parent).parts)
    found: set[str] = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                ours = (name[len(base) + 1 :] for name in names if name.startswith(f"{base}."))
                found |= {name.partition(".")[0] for name in ours}
    return found


@pytest.mark.parametrize("rooms", [OF_STORE, OF_BUCKET], ids=["store", "bucket"])
def test_every_room_has_its_place(rooms: Rooms) -> None:
    there = {file.parent.name for file in rooms.folder.glob("*/__init__.py")}
    assert there == rooms.below.keys()


@pytest.mark.parametrize(("rooms", "room"), CASES, ids=[room for _, room in CASES])
def test_a_room_imports_those_below_it_and_what_is_common(rooms: Rooms, room: str) -> None:
    """By names for types only as well."""
    allowed = rooms.below[room] | rooms.common | rooms.above.get(room, set()) | {room}
    assert imported(rooms.folder, (rooms.folder / room).rglob("*.py")) - allowed == set()


@pytest.mark.parametrize("rooms", [OF_STORE, OF_BUCKET], ids=["store", "bucket"])
def test_what_is_common_imports_no_room(rooms: Rooms) -> None:
    files = (rooms.folder / f"{name}.py" for name in rooms.common)
    assert imported(rooms.folder, files) <= rooms.common
