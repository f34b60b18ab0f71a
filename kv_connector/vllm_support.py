"""`python -m kv_connector.vllm_support`: checks whether kvferry runs on a version of vLLM."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import kv_connector
from kv_connector.vllm.support import Verdict, installed, judge, supported, version_beside


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
    found = installed() if folder is None else (version_beside(folder), folder)
    if found is None:
        print(f"vllm_support: no vLLM here; kvferry supports {supported()}", file=sys.stderr)
        return 2
    verdict = judge(*found)
    if flags.json:
        missing = [each._asdict() for each in verdict.missing]
        print(json.dumps(verdict._asdict() | {"missing": missing}))
    else:
        print("\n".join(_lines_of(verdict)))
    return 1 if verdict.refusal else 0


def _lines_of(verdict: Verdict) -> list[str]:
    how = "tested" if verdict.tested else f"not tested; tested is {supported()}"
    can = "cannot run" if verdict.refusal else "runs"
    return [
        f"kvferry {kv_connector.__version__} {can} on vLLM {verdict.version} ({how})",
        *(f"missing  {name}  ({used_for})" for name, used_for in verdict.missing),
    ]


if __name__ == "__main__":
    sys.exit(main())
