"""Meanings of settings, read from the docstring below each field of a class.

`--help` and the tables in the documentation therefore cannot differ from the code.
"""

import ast
import inspect
import textwrap

import msgspec

from remote_server.sizes import format_bytes


def described(kind: type[msgspec.Struct]) -> dict[str, str]:
    """By field, in the order of the fields: its docstring as one line. Raises `LookupError` for a
    field without one, which is a mistake in this project."""
    texts: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if issubclass(one, msgspec.Struct) and one is not msgspec.Struct:
            texts |= _texts_of(one)
    missing = [name for name in kind.__struct_fields__ if name not in texts]
    if missing:
        raise LookupError(f"{kind.__name__}: no docstring below {', '.join(missing)}")
    return {name: texts[name] for name in kind.__struct_fields__}


def table(kind: type[msgspec.Struct]) -> list[str]:
    """Rows of Markdown: setting, default, meaning."""
    texts = described(kind)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name in texts:
        default = shown(defaults[name])
        cell = default if default == "none" else f"`{default}`"
        lines.append(f"| `{name}` | {cell} | {texts[name]} |")
    return lines


def shown(default: object) -> str:
    """A default as an operator would write it."""
    if default in ("", None):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int) and default >= 1 << 20 and not default % (1 << 20):
        return format_bytes(default).replace(".0 ", "")
    return str(default)


def _texts_of(kind: type) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            texts[field.target.id] = " ".join(text.value.value.split())
    return texts
