"""What a row of benchmarks/sources/README.md names as not here, looked for in the project itself.

    option: kvferry serve --*worker*       no option of that command's help matches
    command: kvferry *register*            no subcommand matches
    value: --eviction s3-fifo              `kvferry serve` refuses the value
    setting: server *compress*             no setting of server, connector or client
    name: remote_server.protocol.Found location*    no attribute of the module or class matches
    module: remote_server *name_server*    no module below the package matches
    test: tests/engine *mla*               no test below the folder matches
    record: machine.gpu *                  no record in benchmarks/results has such a value there

Patterns are those of `fnmatch`. What is searched must exist, so a renamed command or package ends
the search with an error and not with "absent".
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from test_help import SUBCOMMAND

from kv_connector.config import ConnectorConfig
from remote_server.client import ClientConfig
from remote_server.server.config import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": ""}
SETTINGS: dict[str, Any] = {
    "server": ServerConfig, "connector": ConnectorConfig, "client": ClientConfig,
}  # fmt: skip


def found(statement: str) -> list[str]:
    """What contradicts the statement; empty when it holds. Raises `ValueError` for a statement
    that searches nothing."""
    kind, _, rest = statement.partition(": ")
    if kind not in KINDS:
        raise ValueError(f"{statement!r}: none of {', '.join(KINDS)}")
    return KINDS[kind](shlex.split(rest))


def _matching(pattern: str, names: Iterable[str], where: str) -> list[str]:
    known = list(names)
    if not known:
        raise ValueError(f"{where}: nothing to search for {pattern}")
    return [name for name in known if fnmatchcase(name.lower(), pattern.lower())]


def _run(words: Sequence[str]) -> list[str]:
    match words:
        case ["kvferry", *rest]:
            scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
            return [sys.executable, "-m", scripts["kvferry"].partition(":")[0], *rest]
        case ["python", "-m", *rest]:
            return [sys.executable, "-m", *rest]
    raise ValueError(f"{shlex.join(words)}: not a command of this project")


@cache
def _help(words: tuple[str, ...]) -> str:
    ran = subprocess.run(
        [*_run(words), "--help"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
        check=False, timeout=100,
    )  # fmt: skip
    if ran.returncode:
        raise ValueError(f"{shlex.join(words)} --help: exit status {ran.returncode}")
    return ran.stdout


def _option(words: Sequence[str]) -> list[str]:
    *command, pattern = words
    options = dict.fromkeys(re.findall(r"--[a-z][a-z0-9-]*", _help(tuple(command))))
    return _matching(pattern, options, shlex.join(command))


def _command(words: Sequence[str]) -> list[str]:
    *command, pattern = words
    return _matching(pattern, SUBCOMMAND.findall(_help(tuple(command))), shlex.join(command))


def _value(words: Sequence[str]) -> list[str]:
    option, value = words
    if not _option(["kvferry", "serve", option]):
        raise ValueError(f"kvferry serve has no {option}")
    ran = subprocess.run(
        _run(["kvferry", "serve", option, value, "--print-config"]), cwd=ROOT, env=ENVIRONMENT,
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    return [] if ran.returncode == 2 else [f"exit status {ran.returncode}"]


def _setting(words: Sequence[str]) -> list[str]:
    whose, pattern = words
    kind = SETTINGS[whose]
    fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
    return _matching(pattern, fields, whose)


def _name(words: Sequence[str]) -> list[str]:
    where, pattern = words
    module, owner = where, ""
    try:
        searched: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        module, _, owner = where.rpartition(".")
        searched = getattr(importlib.import_module(module), owner)
    return _matching(pattern, dir(searched), where)


def _module(words: Sequence[str]) -> list[str]:
    package, pattern = words
    files = (ROOT / package.replace(".", "/")).rglob("*.py")
    paths = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    return _matching(pattern, (".".join(path) for path in paths), package)


def _test(words: Sequence[str]) -> list[str]:
    folder, pattern = words
    code = "\n".join(file.read_text() for file in (ROOT / folder).rglob("test_*.py"))
    return _matching(pattern, re.findall(r"^def (test_\w+)", code, re.MULTILINE), folder)


def _record(words: Sequence[str]) -> list[str]:
    path, pattern = words
    files = sorted(RESULTS.glob("*.json"))
    values = {file.name: _values(json.loads(file.read_text()), path.split(".")) for file in files}
    if not values:
        raise ValueError(f"{RESULTS}: no record")
    return [name for name, some in values.items() if any(fnmatchcase(v, pattern) for v in some)]


def _values(document: Any, path: Sequence[str]) -> list[str]:
    """All values below `path`, of which `*` is every key; lists are searched as well."""
    if isinstance(document, list):
        return [value for one in document for value in _values(one, path)]
    if not path:
        return [str(document)]
    if not isinstance(document, Mapping):
        return []
    keys = [*document] if path[0] == "*" else [path[0]]
    return [value for key in keys if key in document for value in _values(document[key], path[1:])]


KINDS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "option": _option, "command": _command, "value": _value, "setting": _setting, "name": _name,
    "module": _module, "test": _test, "record": _record,
}  # fmt: skip
