"""A vLLM that lacks what kvferry needs is refused in one sentence, wherever it is noticed first."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kv_connector import TESTED_VLLM, vllm_support
from kv_connector.vllm import support
from kv_connector.vllm.names import NAMES, OPTIONAL
from kv_connector.vllm.support import judge, missing_names
from remote_server.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "kv_connector").rglob("*.py"))
LISTS = {
    file.stem.partition("_")[2]: json.loads(file.read_text())
    for file in Path(__file__).parent.glob("vllm_*.json")
}
"""The names in `vllm_names` that other supported release lines have."""

SUPPORTED = ", ".join(TESTED_VLLM)

Edit = Callable[[str], str | None]


parsed_once = cache(support._parsed)


@pytest.fixture(autouse=True)
def _each_file_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its real path: to parse all that is used of vLLM takes a second, and copies of it differ
    in one file."""
    monkeypatch.setattr(support, "_parsed", lambda file: parsed_once(file.resolve()))


@pytest.fixture(scope="module")
def package() -> Path:
    """The vLLM of this environment."""
    found = support.installed()
    assert found is not None
    return found[1]


def edited(package: Path, into: Path, path: str, edit: Edit) -> Path:
    """A copy of `package` in which one file is another, or gone when `edit` gives None."""
    copy, *parts = into / "vllm", *Path(path).parts
    for part in parts:
        copy.mkdir()
        for entry in package.iterdir():
            if entry.name != part:
                (copy / entry.name).symlink_to(entry)
        package, copy = package / part, copy / part
    if (text := edit(package.read_text())) is not None:
        copy.write_text(text)
    return into / "vllm"


def replace(old: str, new: str) -> Edit:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def lacking(package: Path) -> set[str]:
    return {name for name, _ in missing_names(package, NAMES)}


# ── which names a version lacks ──────────────────────────────────────────────────────────────


OFFLOAD = "v1/kv_offload"


@pytest.mark.parametrize(
    ("path", "edit", "missing"),
    [
        (f"{OFFLOAD}/cpu/common.py", lambda _: None, ["vllm.v1.kv_offload.cpu.common"]),
        (f"{OFFLOAD}/tiering/base.py", replace("class ParentManager", "class Parent"),
         ["vllm.v1.kv_offload.tiering.base.ParentManager"]),
        (f"{OFFLOAD}/tiering/spec.py", replace("_scheduler_mmap", "_mmap"),
         ["vllm.v1.kv_offload.tiering.spec.TieringOffloadingSpec._scheduler_mmap"]),
        # Defined in a base class of the one that is used.
        (f"{OFFLOAD}/cpu/spec.py", replace("self.num_chunks", "self.num_rows"),
         ["vllm.v1.kv_offload.tiering.spec.TieringOffloadingSpec.num_chunks"]),
        (f"{OFFLOAD}/tiering/base.py", replace("backpressure_detector:", "detector:"),
         ["vllm.v1.kv_offload.tiering.base.SecondaryTierManager.__init__(backpressure_detector)"]),
        # Imported from elsewhere by the module that is used.
        ("config/__init__.py", replace("CacheConfig", "KVConfig"), ["vllm.config.CacheConfig"]),
        ("platforms/__init__.py", replace("current_platform", "platform_now"),
         ["vllm.platforms.current_platform"]),
    ],
)  # fmt: skip
def test_what_was_taken_away_is_named_and_nothing_else(
    package: Path, tmp_path: Path, path: str, edit: Edit, missing: list[str]
):
    tree = edited(package, tmp_path, path, edit)
    assert lacking(tree) - lacking(package) == {*missing}


# ── the list is complete ─────────────────────────────────────────────────────────────────────


def listed(module: str, name: str) -> bool:
    return any(each == name or each.startswith(f"{name}.") for each in NAMES.get(module, ()))


def test_every_name_that_is_imported_from_vllm_is_listed():
    imports = {
        (node.module or "", alias.name)
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
        for alias in node.names
    }
    assert len(imports) > 40
    assert [pair for pair in sorted(imports) if not listed(*pair)] == []


MEMBERS = {name.partition(".")[2] for names in NAMES.values() for name in names}
# Of named tuples, and of torch.
NOT_VLLM = {"_asdict", "_replace", "_is_amx_tile_supported", "_init_amx", "_C"}


def test_every_private_attribute_of_a_thing_not_ours_is_listed():
    assert [at for at in private_attributes() if at[1] not in MEMBERS | NOT_VLLM] == []


def private_attributes() -> Iterator[tuple[str, str]]:
    """Of anything but `self`, read in place or by `getattr`, with the file."""
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    continue
                case ast.Attribute(attr=name):
                    pass
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(str(name)), *_]):
                    pass
                case _:
                    continue
            if name.startswith("_") and not name.startswith("__"):
                yield file.name, name


def test_every_inherited_member_that_is_used_is_listed():
    """`self.x` in a class of ours that is derived from one of vLLM's, and does not define `x`."""
    unlisted = []
    for file in SOURCES:
        module = ast.parse(file.read_text())
        foreign = {
            alias.name
            for node in ast.walk(module)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
            for alias in node.names
        }
        for cls in (node for node in module.body if isinstance(node, ast.ClassDef)):
            if foreign.intersection(ast.unparse(base) for base in cls.bases):
                unlisted += [(file.name, name) for name in used(cls) - own(cls) - MEMBERS]
    assert unlisted == []


def used(cls: ast.ClassDef) -> set[str]:
    """Members read on `self`, and called on `super()`."""
    found = set()
    for node in ast.walk(cls):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                found.add(name)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                found |= {name} - {"__init__"}
    return found


def own(cls: ast.ClassDef) -> set[str]:
    methods = {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}
    declared = {ast.unparse(node.target) for node in cls.body if isinstance(node, ast.AnnAssign)}
    return (
        methods
        | declared
        | {
            node.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
    )


# ── what that means ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "version", [*TESTED_VLLM, f"{TESTED_VLLM[0]}.1", f"{TESTED_VLLM[0]}.0+cpu"]
)
def test_a_tested_line_is_not_looked_at(version: str, tmp_path: Path):
    assert judge(version, tmp_path / "nothing here").refusal == ""


@pytest.mark.parametrize("version", ["dev", "1.0.0rc1"])
def test_another_version_runs_if_it_has_every_name(version: str, package: Path):
    verdict = judge(version, package)
    assert (verdict.tested, verdict.refusal) == (False, "")
    assert {name for name, _ in verdict.missing} <= OPTIONAL


def test_a_version_without_an_optional_name_runs_and_it_is_listed(package: Path, tmp_path: Path):
    path = f"{OFFLOAD}/base.py"
    tree = edited(package, tmp_path, path, replace("_offload_key_positions", "_positions"))
    verdict = judge("0.99.0", tree)
    assert verdict.refusal == ""
    gone = {"vllm.v1.kv_offload.base.ReqContext._offload_key_positions"}
    assert lacking(tree) - lacking(package) == gone
    assert gone <= {name for name, _ in verdict.missing} <= OPTIONAL


def test_what_this_vllm_lacks_is_optional(package: Path):
    assert lacking(package) <= OPTIONAL


@pytest.mark.parametrize("line", LISTS)
def test_what_another_supported_vllm_lacks_is_optional(line: str):
    """By the list that `make other-vllm` has written there."""
    ours = {f"{module}.{name}" for module, names in NAMES.items() for name in names}
    gone = ours - {*LISTS[line]["has"]} - OPTIONAL
    assert not gone, f"not in the list of vLLM {line}: run make other-vllm VLLM=…"
    assert LISTS[line]["vllm"].startswith(f"{line}.")


def test_each_supported_line_is_installed_here_or_has_a_list():
    found = support.installed()
    assert found is not None
    here = ".".join(found[0].split(".")[:2])
    assert {here, *LISTS} == {*TESTED_VLLM, here}


def test_of_many_missing_names_a_few_are_named_and_the_rest_counted(tmp_path: Path):
    said = judge("0.30.0", tmp_path).refusal
    modules = {*NAMES} - OPTIONAL
    assert said.endswith(f" and {len(modules) - 4} more (python -m kv_connector.vllm_support)")


def test_the_command_lists_what_an_unpacked_version_lacks(package: Path, tmp_path: Path, capsys):
    here, _ = support.installed() or ("", None)
    tree = edited(package, tmp_path, "_version.py", replace(f"'{here}'", "'0.30.7'"))
    assert vllm_support.main([str(tree)]) == 1
    assert "cannot run on vLLM 0.30.7" in capsys.readouterr().out
    assert vllm_support.main([]) == 0
    assert f"runs on vLLM {here}" in capsys.readouterr().out
    assert vllm_support.main([str(tmp_path)]) == 2
    assert "not the folder of a package" in capsys.readouterr().err


def test_without_vllm_the_sentence_says_which_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=rf"kvferry needs vLLM {SUPPORTED}, and none is"):
        support.refuse_unsupported()


# ── in a process that runs such a version ────────────────────────────────────────────────────

FACTORY = """
import importlib
class KVConnectorFactory:
    loaders = {}
    @classmethod
    def register_connector(cls, name, module, class_name):
        if name in cls.loaders:
            raise ValueError(name)
        cls.loaders[name] = lambda: getattr(importlib.import_module(module), class_name)
"""


def fake_vllm(folder: Path, version: str, *, factory: str = "") -> Path:
    """A package that has the name, a version, and at most a factory of connectors."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    if factory:
        place = package / "distributed/kv_transfer/kv_connector"
        place.mkdir(parents=True)
        for each in (place, *place.parents[:2]):
            (each / "__init__.py").touch()
        (place / "factory.py").write_text(factory)
    return folder


def python(folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    """`code` where `import vllm` finds what is in `folder`."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={"PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("module", "version"), [("connector", "0.30.0"), ("tier.remote_tier", "0.99.0")]
)
def test_what_vllm_loads_by_path_refuses_in_one_sentence(module: str, version: str, tmp_path: Path):
    ran = python(fake_vllm(tmp_path, version), f"import kv_connector.{module}")
    *_, last = ran.stderr.strip().splitlines()
    assert last.startswith("remote_server.errors.ConfigError: kvferry ")
    assert f"cannot run on vLLM {version}: install a supported vLLM" in last
    assert "missing there: vllm.distributed." in last
    assert "ModuleNotFoundError" not in ran.stderr and "torch" not in ran.stderr


def test_the_plugin_leads_to_the_sentence_when_the_connector_is_named(tmp_path: Path):
    ran = python(
        fake_vllm(tmp_path, "0.30.0", factory=FACTORY),
        "from kv_connector import CONNECTOR, register\n"
        "import sys\n"
        "register(); register()\n"
        "assert 'kv_connector.connector' not in sys.modules\n"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory\n"
        "print('registered')\n"
        "KVConnectorFactory.loaders[CONNECTOR]()",
    )
    assert ran.stdout == "registered\n"
    assert "ConfigError: kvferry " in ran.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("factory", ["", "1 / 0", "class KVConnectorFactory: pass"])
def test_the_plugin_breaks_no_vllm_and_logs_one_line(factory: str, tmp_path: Path):
    ran = python(
        fake_vllm(tmp_path, "0.10.0", factory=factory),
        "from kv_connector import register\nregister(); register()",
    )
    assert ran.returncode == 0
    (line,) = ran.stderr.splitlines()
    assert line.startswith(
        f"KVFerryConnector is not registered: kvferry supports vLLM {SUPPORTED}, and "
    )
