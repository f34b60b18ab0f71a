"""The rooms as an SVG: each above all that it imports, with an arrow to each that it imports.

An arrow is left out where others lead to the same room, so that those that are left can be
followed. Arrows that run back are all there, in red.
"""

from html import escape
from itertools import pairwise
from statistics import fmean

WIDTH, HEIGHT, GAP, LEVEL = 138, 38, 22, 74
SWEEPS = 60
COLOURS = {
    "remote_server/client": "#cfe3f7", "remote_server/store": "#f8dfc0", "kv_connector": "#e4d5f3",
    "remote_server/server": "#cdeccd", "": "#ececec",
}  # fmt: skip

Node = str | tuple[str, str, int]
"""A room, or the place where the arrow of two rooms passes a level."""


def drawing_of(arrows: dict[str, dict[str, set[str]]], order: list[str]) -> str:
    place = {room: number for number, room in enumerate(order)}
    ahead = {room: {to for to in arrows[room] if place[to] < place[room]} for room in order}
    reached: dict[str, set[str]] = {}
    level: dict[Node, int] = {}
    for room in order:
        reached[room] = ahead[room].union(*(reached[to] for to in ahead[room]))
        level[room] = 1 + max((level[to] for to in ahead[room]), default=-1)
    for room in reversed(order):
        above = [level[other] for other in order if room in ahead[other]]
        level[room] = min(above, default=level[room] + 1) - 1
    ways: list[list[Node]] = []
    for room in order:
        for to in sorted(ahead[room]):
            if not any(to in reached[other] for other in ahead[room]):
                passed = [(room, to, each) for each in range(level[room] - 1, level[to], -1)]
                level |= {node: node[2] for node in passed}
                ways.append([room, *passed, to])
    x = _across(level, ways)
    high = max(level.values())
    y = {node: 20 + (high - at) * LEVEL for node, at in level.items()}
    red = [(room, to) for room in order for to in sorted(arrows[room]) if to not in ahead[room]]
    left = min(x.values()) - WIDTH / 2 - 80
    size = f"{left:.0f} 0 {max(x.values()) + WIDTH / 2 + 20 - left:.0f} {(high + 1) * LEVEL + 20}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif">',
        "<style>path{fill:none;stroke:#667;stroke-width:1.3;marker-end:url(#a)}"
        ".back{stroke:#d00;stroke-width:2;stroke-dasharray:6 3;marker-end:url(#b)}</style>",
        *(_head(name, colour) for name, colour in (("a", "#667"), ("b", "#d00"))),
        f'<rect x="{left:.0f}" width="100%" height="100%" fill="#fff"/>',
        *(_arrow(way, x, y) for way in ways),
        *(_box(room, x[room], y[room]) for room in order),
        *(_back(x[room], y[room], x[to], y[to]) for room, to in red),
        "</svg>\n",
    ])  # fmt: skip


def _across(level: dict[Node, int], ways: list[list[Node]]) -> dict[Node, float]:
    """Where nodes are: near those that their arrows lead to and from."""
    beside: dict[Node, list[tuple[Node, int]]] = {node: [] for node in level}
    for way in ways:
        for upper, lower in pairwise(way):
            beside[upper].append((lower, -1))
            beside[lower].append((upper, 1))
    rows = [[node for node in level if level[node] == at] for at in range(max(level.values()) + 1)]
    x: dict[Node, float] = dict.fromkeys(level, 0.0)
    for sweep in range(SWEEPS):
        up = sweep % 2 == 0
        for row in rows if up else reversed(rows):
            side = {-1, 1} if sweep > SWEEPS - 10 else {-1} if up else {1}
            near = {node: [x[to] for to, way in beside[node] if way in side] for node in row}
            wanted = {node: fmean(near[node] or [x[node]]) for node in row}
            row.sort(key=wanted.__getitem__)
            at = [0.0]
            for one, other in pairwise(row):
                room = (_width(one) + _width(other)) / 2 + GAP
                at.append(max(wanted[other] - wanted[row[0]], at[-1] + room))
            shift = fmean(wanted[node] - each for node, each in zip(row, at, strict=True))
            x |= {node: each + shift for node, each in zip(row, at, strict=True)}
    return x


def _width(node: Node) -> int:
    return WIDTH if isinstance(node, str) else 4


def _arrow(way: list[Node], x: dict[Node, float], y: dict[Node, int]) -> str:
    passed = [f"L{x[node]:.0f} {y[node] + HEIGHT // 2}" for node in way[1:-1]]
    start, end = f"M{x[way[0]]:.0f} {y[way[0]] + HEIGHT}", f"L{x[way[-1]]:.0f} {y[way[-1]] - 1}"
    return f'<path d="{" ".join([start, *passed, end])}"/>'


def _back(x: float, y: int, to_x: float, to_y: int) -> str:
    side = min(x, to_x) - WIDTH / 2
    start, end = x - WIDTH / 2, to_x - WIDTH / 2 - 3
    return (
        f'<path class="back" d="M{start:.0f} {y + HEIGHT // 2} C{side - 70:.0f} {y} '
        f'{side - 70:.0f} {to_y + HEIGHT} {end:.0f} {to_y + HEIGHT // 2}"/>'
    )


def _box(room: str, x: float, y: int) -> str:
    folder, _, name = room.rpartition("/")
    colour = next(each for start, each in COLOURS.items() if room.startswith(start))
    return (
        f'<rect x="{x - WIDTH / 2:.0f}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" '
        f'fill="{colour}" stroke="#889"/><text x="{x:.0f}" text-anchor="middle">'
        f'<tspan x="{x:.0f}" y="{y + 14}" font-size="10" fill="#556">{escape(folder)}</tspan>'
        f'<tspan x="{x:.0f}" y="{y + 29}" font-size="13">{escape(name)}</tspan></text>'
    )


def _head(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto" markerUnits="userSpaceOnUse"><path d="M0 0L8 4L0 8z" '
        f'style="fill:{colour};stroke:none;marker-end:none"/></marker>'
    )
