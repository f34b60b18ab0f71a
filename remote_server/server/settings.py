"""Settings by source: flags over environment over file over defaults, under the same names.

    kvferry serve --memory 8GiB        KVFERRY_MEMORY=8GiB        memory = "8GiB"

A file is TOML. Settings before its first table apply to every server; `[servers.NAME]` is one of
several, chosen by `--name`, and NAME is then the server's name. An unknown flag or key is an error
that names the nearest one. An unknown `KVFERRY_…` variable is not an error, because container
platforms create such variables: `KVFERRY_PORT` for a service of that name. One that resembles a
setting is logged as a warning.

The meaning of a setting is the docstring below its field, so `--help` and the tables in the
documentation cannot differ from the code.
"""

import argparse
import ast
import difflib
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from remote_server.errors import ConfigError
from remote_server.keys import read_small, toml_of
from remote_server.plain_text import plain, without_secrets
from remote_server.server.config import GROUPS, ServerConfig
from remote_server.values import Size, finite_number, parse_bytes, whole_number, written_size


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


def table(kind: type[msgspec.Struct], names: Sequence[str] = ()) -> list[str]:
    """Rows of Markdown: setting, default, meaning; of all settings, or of `names`."""
    texts = described(kind)
    texts = {name: texts[name] for name in names or texts}
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
    return written_size(default) if isinstance(default, int) else str(default)


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


log = logging.getLogger(__name__)

PREFIX = "KVFERRY_"
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")


class Chosen(NamedTuple):
    """The settings in force, and the source of each: `default` and the like."""

    config: ServerConfig
    origins: dict[str, str]

    def as_toml(self) -> str:
        """A file that gives these settings again; each line names the source of its value."""
        lines = []
        for name, origin in self.origins.items():
            text = _toml_of(getattr(self.config, name))
            lines.append(f"{f'{name} = {text}':<44} # {plain(origin)}")
        return "\n".join(lines)


def _toml_of(value: object) -> str:
    if isinstance(value, str):  # JSON escapes all that TOML does, but for DEL
        return msgspec.json.encode(value).decode().replace("\x7f", r"\u007F")
    return str(value).lower()


def add_sources(parser: argparse._ActionsContainer) -> None:
    """The flags that name other sources of settings, or show what came from where."""
    parser.add_argument(
        "--settings", metavar="FILE", help="read settings from this TOML file (KVFERRY_SETTINGS)"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the settings in force, and exit"
    )


def add_flags(parser: argparse._ActionsContainer) -> None:
    """A flag for each setting of `ServerConfig`, in its groups."""
    explained = described(ServerConfig)
    fields = {field.name: field for field in msgspec.structs.fields(ServerConfig)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            flag, field = flag_of(name), fields[name]
            default = f" (default: {shown(field.default)})" if field.default != "" else ""
            text = f"{explained[name]}{default}".replace("%", "%%")
            if field.type is bool:
                group.add_argument(
                    flag, action=argparse.BooleanOptionalAction, default=None, help=text
                )
            else:
                group.add_argument(flag, metavar=metavar_of(field.type), default=None, help=text)


def flag_of(name: str) -> str:
    """The flag of the setting `name`."""
    return "--" + name.replace("_", "-")


def arguments_of(flags: argparse.Namespace) -> list[str]:
    """Arguments that give the same `flags`, without those that are no setting."""
    given = [f"--settings={flags.settings}"] if flags.settings else []
    for name in ServerConfig.__struct_fields__:
        value = getattr(flags, name)
        if isinstance(value, bool):
            given.append(flag_of(name) if value else flag_of(f"no_{name}"))
        elif value is not None:
            given.append(f"{flag_of(name)}={value}")
    return given


def choose(flags: argparse.Namespace, environment: Mapping[str, str]) -> Chosen:
    """Raises `ConfigError` that names the setting, its value and its source."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    kinds = {field.name: field.type for field in msgspec.structs.fields(ServerConfig)}
    path = flags.settings or environment.get(f"{PREFIX}SETTINGS", "")
    name = environment.get(f"{PREFIX}NAME") if flags.name is None else flags.name
    layers = [
        (f"file {path}", _from_file(path, name) if path else {}),
        ("environment", _from_environment(environment, kinds)),
        ("flag", {name: getattr(flags, name) for name in kinds}),
    ]
    for origin, layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            try:
                values[name] = _converted(name, value, kinds[name])
            except ConfigError as error:
                raise ConfigError(without_secrets(f"{error} ({origin})")) from error
            origins[name] = origin
    config = ServerConfig(**values)
    return Chosen(config, {name: origins.get(name, "default") for name in kinds})


def names_in(path: str) -> list[str]:
    """The names of the servers in the file `path`, in their order. Raises `ConfigError`."""
    return list(_read(path)[1])


def _read(path: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings of every server, and those of each by name."""
    found = toml_of(read_small(path, "settings").data, path, "settings")
    servers = found.pop("servers", {})
    if not isinstance(servers, dict) or not all(isinstance(one, dict) for one in servers.values()):
        raise ConfigError(f"settings: {path}: write one server of several as [servers.NAME]")
    return found, servers


def _from_file(path: str, name: str | None) -> dict[str, Any]:
    found, servers = _read(path)
    known = ", ".join(servers) or "none"
    if name is not None and servers and name not in servers:
        raise ConfigError(f"--name {name}: {path} has no [servers.{name}]; it has {known}")
    if name is None and servers:
        raise ConfigError(f"settings: {path} has several servers, {known}: choose one by --name")
    chosen = {**found, **(servers.get(name, {}) if name is not None else {})}
    if servers and chosen.setdefault("name", name) != name:
        raise ConfigError(
            f"settings: {path}: [servers.{name}] has the name {chosen['name']!r}; the table's name "
            "is the server's: write one of them"
        )
    for key in chosen:
        if key not in ServerConfig.__struct_fields__:
            raise ConfigError(f"settings: {path}: unknown setting {key!r}{_nearest(key)}")
    return chosen


def _from_environment(environment: Mapping[str, str], kinds: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in kinds:
            found[name] = value
        elif name != "settings" and (near := difflib.get_close_matches(name, kinds, 1, 0.8)):
            log.warning(
                "%s is not a setting; did you mean %s%s?", variable, PREFIX, near[0].upper()
            )
    return found


def _converted(name: str, value: Any, kind: Any) -> Any:
    """`value`, as a flag, a variable or TOML gave it, as the setting's own type."""
    bare = bare_kind(kind)
    if bare is bool:
        if isinstance(value, str) and value.lower() in (*_YES, *_NO):
            return value.lower() in _YES
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: {value!r} is neither true nor false")
        return value
    try:
        if kind is Size and isinstance(value, int | str) and not isinstance(value, bool):
            return parse_bytes(value, name)
        if bare is str and isinstance(value, str):
            return _encodable(value)
        if bare in _NUMBERS:
            return _NUMBERS[bare](value)
    except ValueError:
        pass
    raise ConfigError(f"{name}: {value!r:.80} where {metavar_of(kind)} is wanted")


_NUMBERS: Mapping[Any, Callable[[object], float]] = {int: whole_number, float: finite_number}


def _encodable(text: str) -> str:
    """`text`. Raises `ValueError` when a flag or a variable held bytes that are no text."""
    text.encode()
    if "\0" in text:
        raise ValueError("a zero byte")
    return text


def bare_kind(kind: Any) -> Any:
    """The type of a setting without its metavariable; `str` where it is one of some words."""
    if get_origin(kind) is Literal:
        return str
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def metavar_of(kind: Any) -> str:
    """The word that stands for a value of a setting on help pages."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    if get_origin(kind) is Annotated:
        return str(get_args(kind)[1].extra["metavar"])
    return {int: "COUNT", float: "NUMBER"}.get(kind, "TEXT")


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, ServerConfig.__struct_fields__, 1, 0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
