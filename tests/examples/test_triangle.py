"""The triangle: levels follow from counts, and what is printed and written from the cells."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.harness.compare import compare_records
from benchmarks.harness.record import Record
from examples import triangle_picture
from examples.endpoint import FirstToken
from examples.token_sources import COMPUTED, DISK, ENGINE, MEMORY, POOL, Counts, tokens_from
from examples.triangle import Cell, Triangle
from examples.triangle_picture import NoPicture

HOLDS = [(ENGINE, 1), (POOL, 2), (MEMORY, 3), (DISK, 6)]
SECONDS = {COMPUTED: 10.0, ENGINE: 0.1, POOL: 0.2, MEMORY: 0.4, DISK: 0.8}


def cell(
    round_: int, document: int, level: str, *, of_level: int = 640, seconds: float = 0
) -> Cell:
    tokens = {COMPUTED: 640 + 13 - (of_level if level != COMPUTED else 0), level: of_level}
    if level == COMPUTED:
        tokens = {COMPUTED: 653}
    return Cell(round_, document, seconds or SECONDS[level], 640, tokens)


def whole(n: int = 6) -> Triangle:
    """As it must be when the levels hold 1, 2, 3 and all documents."""
    levels = [None, None, ENGINE, POOL, MEMORY, DISK, DISK]
    return Triangle(
        n, [cell(i, j, COMPUTED if i == j else str(levels[i])) for i, j in Triangle.places(n)]
    )


def counts(engine: int, pool: int, server: int, got: int | None, disk: int | None) -> Counts:
    return Counts({"engine": engine, "pool": pool, "server": server}, got, disk)


ZERO = counts(1000, 2000, 3000, 400, 50)


@pytest.mark.parametrize(
    ("after", "tokens"),
    [
        (ZERO, {COMPUTED: 653}),
        (counts(1640, 2000, 3000, 400, 50), {COMPUTED: 13, ENGINE: 640}),
        (counts(1000, 2640, 3000, 400, 50), {COMPUTED: 13, POOL: 640}),
        (counts(1000, 2000, 3640, 420, 50), {COMPUTED: 13, MEMORY: 640}),
        (counts(1000, 2000, 3640, 420, 70), {COMPUTED: 13, DISK: 640}),
        (counts(1000, 2000, 3640, 420, 55), {COMPUTED: 13, MEMORY: 480, DISK: 160}),
        (
            counts(1032, 2064, 3320, 410, 51),
            {COMPUTED: 237, ENGINE: 32, POOL: 64, MEMORY: 288, DISK: 32},
        ),
    ],
)
def test_tokens_come_from_what_engine_and_server_count(after: Counts, tokens: dict[str, int]):
    assert tokens_from(FirstToken(0.1, 653, None), ZERO, after) == tokens


def test_what_nobody_counts_is_not_guessed():
    blind = Counts(None, None, None)
    assert tokens_from(FirstToken(0.1, 653, 640), blind, blind) == {"cached": 640, COMPUTED: 13}
    assert tokens_from(FirstToken(0.1, 653, None), blind, blind) == {"unknown": 653}
    assert tokens_from(FirstToken(0.1, None, None), ZERO, ZERO) == {}
    one, other = counts(0, 0, 0, None, None), counts(0, 0, 640, None, None)
    assert tokens_from(FirstToken(0.1, 653, None), one, other) == {"server": 640, COMPUTED: 13}


def test_a_cell_is_of_the_level_that_most_of_its_document_came_from():
    assert (cell(3, 1, POOL).level, cell(3, 1, POOL).mixed) == (POOL, False)
    # The question is always computed: it does not make a short document a computed one.
    short = Cell(2, 1, 0.1, 8, {COMPUTED: 13, ENGINE: 8})
    assert (short.level, short.mixed) == (ENGINE, False)
    assert (cell(3, 1, POOL, of_level=608).mark, cell(3, 1, POOL, of_level=576).mark) == ("p", "p*")
    assert cell(3, 1, POOL, of_level=64).mark == "c*"
    assert Cell(1, 1, 0.1, 0, {}).mark == "?"


def test_the_triangle_is_printed_aligned_with_a_line_for_each_level():
    assert whole().text() == EXPECTED


EXPECTED = """\
round       1         2         3         4         5         6
    1  10.000 c
    2   0.100 e  10.000 c
    3   0.200 p   0.200 p  10.000 c
    4   0.400 m   0.400 m   0.400 m  10.000 c
    5   0.800 d   0.800 d   0.800 d   0.800 d  10.000 c
    6   0.800 d   0.800 d   0.800 d   0.800 d   0.800 d  10.000 c

   level          cells  median s  fastest  slowest  faster
-  -------------  -----  --------  -------  -------  ------
c  computed           6    10.000   10.000   10.000    1.0x
e  engine cache       1     0.100    0.100    0.100  100.0x
p  CPU pool           2     0.200    0.200    0.200   50.0x
m  server memory      3     0.400    0.400    0.400   25.0x
d  server disk        9     0.800    0.800    0.800   12.5x"""


def test_a_mixed_cell_has_a_star_and_its_time_belongs_to_no_level():
    triangle = whole(3)
    triangle.cells[3] = cell(3, 1, POOL, of_level=352, seconds=5.0)
    assert "5.000 p*" in triangle.text()
    assert triangle.text().endswith(
        "* mixed: 1 cells came from more than one level; not counted here"
    )
    assert triangle.by_level()[POOL] == [0.2]


def test_every_cell_of_another_level_is_told_with_its_counts():
    triangle = whole()
    assert triangle.wrong(HOLDS) == []
    triangle.cells[1] = cell(2, 1, POOL)
    triangle.cells[2] = cell(2, 2, ENGINE)
    triangle.cells[6] = cell(4, 1, MEMORY, of_level=352)
    assert triangle.wrong(HOLDS) == [
        "round 2, document 1: not all from engine cache, but 13 computed, 640 CPU pool",
        "round 2, document 2: not all from computed, but 13 computed, 640 engine cache",
        "round 4, document 1: not all from server memory, but 301 computed, 352 server memory",
    ]


def test_its_record_is_one_that_two_runs_can_be_compared_by(tmp_path: Path):
    record = Record.begin("examples.stress_test", ["--start", "--json", "x.json"])
    whole().add_to(record, "wide")
    record.write(tmp_path / "a.json")
    again = Record.read(tmp_path / "a.json")
    assert again.command == "python -m examples.stress_test --start"
    assert {row.operation: row.sample.values for row in again.rows} == {
        "first token: computed": [10.0] * 6,
        "first token: engine cache": [0.1],
        "first token: CPU pool": [0.2] * 2,
        "first token: server memory": [0.4] * 3,
        "first token: server disk": [0.8] * 9,
    }
    assert len(again.figures) == 21
    assert again.figures[1].name == "round 2, document 1"
    assert dict(again.figures[1].values) == {"seconds": 0.1, COMPUTED: 13, ENGINE: 640}
    assert compare_records(record, again).comparable


def test_the_picture_shows_every_cell_and_level_and_is_the_same_each_time(tmp_path: Path):
    pytest.importorskip("matplotlib")
    triangle = whole(4)
    triangle.cells[3] = cell(3, 1, POOL, of_level=352, seconds=5.0)
    for name in ("a.svg", "b.svg", "a.png"):
        triangle_picture.draw(triangle, "a title & more", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("10.0") == 4 and words.count("0.400") == 3 and words.count("5.00") == 1
    assert {"a title & more", "document", "round", *SECONDS} - {DISK} <= {*words}
    assert DISK not in words
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path: Path):
    triangle_picture.check(tmp_path / "fine.svg")
    with pytest.raises(NoPicture, match=r"\.svg or \.png"):
        triangle_picture.check(tmp_path / "x.pdf")
    with pytest.raises(NoPicture, match="no folder"):
        triangle_picture.check(tmp_path / "missing" / "x.svg")
