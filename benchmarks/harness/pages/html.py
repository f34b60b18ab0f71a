"""The frame of every page: one file that loads nothing, light or dark as the browser prefers."""

from collections.abc import Iterable
from html import escape

THEME = """
:root { color-scheme: light dark; --ink: #1a1a1a; --ground: #fff; --line: #d5d8dd;
  --soft: #f3f5f7; --quiet: #5c636e; --good: #0b6b3a; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --ground: #16181c; --line: #3d434c; --soft: #22262c; --quiet: #a4acb8;
    --good: #6fd39b; --bad: #ff8a80 }
}
body { color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif;
  max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
code { font-size: 90%; overflow-wrap: anywhere }
"""


def whole(title: str, style: str, parts: Iterable[str]) -> str:
    """A page of `parts`. They are HTML; `title` is text."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n{body}\n"
        "</body></html>\n"
    )
