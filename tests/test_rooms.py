"""The list of rooms and their drawing: computed orders, and arrows that run back."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / ".ci" / "rooms.py"


class Rooms(NamedTuple):
    status: int
    order: list[str]
    back: list[str]
    svg: str


def rooms_of(tree: Path) -> Rooms:
    picture = tree / "rooms.svg"
    done = subprocess.run(
        [sys.executable, SCRIPT, tree, "--svg", picture],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()[:-1]
    return Rooms(
        done.returncode,
        [line for line in lines if not line.startswith(" ")],
        [line.strip() for line in lines if line.startswith("  !")],
        picture.read_text(),
    )


def made_up(folder: Path, files: dict[str, str]) -> Path:
    """`files` by module, each with the modules that it imports."""
    for module, imported in files.items():
        file = folder / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"from {each} import name\n" for each in imported.split()))
    return folder


LAYERS = {
    "kv_connector.tier.tier": "remote_server.client.loop",
    "remote_server.client.loop": "remote_server.client.lanes.link remote_server.client.results",
    "remote_server.client.lanes.link": "remote_server.client.results remote_server.wire.codec",
    "remote_server.client.results": "remote_server.wire.codec",
    "remote_server.wire.codec": "",
}


def test_a_folder_comes_behind_all_that_it_imports(tmp_path):
    rooms = rooms_of(made_up(tmp_path, LAYERS))
    assert rooms.status == 0 and rooms.back == []
    assert rooms.order == [
        "remote_server/wire", "remote_server/client:base", "remote_server/client/lanes",
        "remote_server/client", "kv_connector/tier",
    ]  # fmt: skip
    assert rooms.svg.count("<rect") == 1 + len(rooms.order) and 'class="back"' not in rooms.svg


def test_an_arrow_that_runs_back_is_marked_and_fails_also_for_types_only(tmp_path):
    tree = made_up(tmp_path, LAYERS)
    (tree / "remote_server/wire/codec.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from remote_server.client.lanes.link import name\n"
    )
    rooms = rooms_of(tree)
    assert rooms.status == 1
    assert rooms.back == ["! remote_server/client/lanes: remote_server/wire/codec.py"]
    assert rooms.svg.count('class="back"') == 1


def test_a_room_that_needs_a_circle_is_not_part_of_it(tmp_path):
    files = {
        "remote_server.a.one": "remote_server.b.one",
        "remote_server.b.one": "remote_server.c.one",
        "remote_server.c.one": "remote_server.b.one",
        "remote_server.c.two": "remote_server.b.one",
    }
    rooms = rooms_of(made_up(tmp_path, files))
    assert rooms.back == ["! remote_server/c: remote_server/b/one.py"]
    assert rooms.order == ["remote_server/b", "remote_server/c", "remote_server/a"]


def test_a_module_and_a_package_are_imported_by_either_form(tmp_path):
    tree = made_up(tmp_path, {"remote_server.a.one": "", "remote_server.b.__init__": ""})
    (tree / "remote_server/a/one.py").write_text("import remote_server.b\n")
    assert rooms_of(tree).order == ["remote_server/b", "remote_server/a"]
    (tree / "remote_server/a/one.py").write_text("")
    (tree / "remote_server/b/__init__.py").write_text("from remote_server.a import one\n")
    assert rooms_of(tree).order == ["remote_server/a", "remote_server/b"]


def test_arrows_that_others_imply_are_not_drawn(tmp_path):
    files = {
        "remote_server.a.one": "remote_server.b.one remote_server.c.one",
        "remote_server.b.one": "remote_server.c.one",
        "remote_server.c.one": "",
    }
    drawn = re.findall(r'<path d="M[^"]+L[^"z]+"/>', rooms_of(made_up(tmp_path, files)).svg)
    assert len(drawn) == 2


def test_no_arrow_of_the_packages_runs_back_and_the_drawing_is_what_make_docs_writes(tmp_path):
    picture = tmp_path / "rooms.svg"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--svg", picture], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if "!" in line]
    assert picture.read_text() == (ROOT / "docs" / "rooms.svg").read_text(), "make docs"
