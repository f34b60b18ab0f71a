"""The build of `libkvferry.so` from the C files beside this one, and the tag of a wheel with it.

    python -m remote_server.native.build [--optional]

compiles the library and prints one line. The exit status is 1 if there is no library afterwards;
with `--optional` a missing compiler is no failure, a C file that does not compile still is.

setup.py loads this file by its path, in environments that have nothing but setuptools: it imports
the standard library only. An installation never requires a compiler: without the library
`remote_server/native/reference.py` does the same work in Python.
"""

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libkvferry.so"

FLAGS = ("-std=c11", "-O3", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread")
"""No flag selects instructions: functions that use AVX declare it, and are chosen at run time."""

LINKED = ("-ldl",)
"""Behind the sources. glibc has it in itself since 2.34."""

COMPILE_TIMEOUT_S = 120.0

OLDEST_GLIBC = (2, 17)
"""The oldest one that pip's tags of today name, and the one that zig compiles for."""

ON_EVERY_HOST = ("libc.", "libpthread.", "libdl.", "librt.", "libm.", "libgcc_s.", "ld-linux")
"""Beginnings of the names of libraries that a manylinux wheel may need and not contain."""


class Compiler(NamedTuple):
    name: str
    command: list[str]


class Outcome(NamedTuple):
    """`library`: none when it could not be built. `line`: a sentence about it, to be printed."""

    library: Path | None
    line: str
    no_compiler: bool = False


def compilers() -> Iterator[Compiler]:
    """Those that are here, in the order in which they are tried, each once."""
    seen = []
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if command and (path := shutil.which(command[0])):
            program = [os.path.realpath(path), *command[1:]]
            if program not in seen:
                seen.append(program)
                yield Compiler(command[0], [path, *command[1:]])
    machine, (libc, _) = platform.machine(), platform.libc_ver()
    # Without a target zig would use all instructions of this processor, and this host's glibc;
    # without -s 0.9 MB of symbols.
    if libc == "glibc" and machine in ("x86_64", "aarch64") and importlib.util.find_spec("ziglang"):
        target = f"{machine}-linux-gnu.{'.'.join(map(str, OLDEST_GLIBC))}"
        yield Compiler("zig", [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"])


def build(target: Path, *, strict: bool = False) -> Outcome:
    """Compile the C files into `target`. Its processes keep the file that they have mapped.

    The first compiler whose result can be loaded here decides. With `strict` warnings are errors:
    for the tests, since a newer compiler with a new warning should not cost a user the library.
    After a failure there is no `target`: one of older sources would be taken for one of these.
    """
    sources = sorted(map(str, SOURCES.glob("*.c")))
    failures = []
    # Renamed when it is complete, so that no process loads a part of it.
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.so")
    try:
        for compiler in compilers() if sources else ():
            flags = [*FLAGS, "-Werror"] if strict else FLAGS
            failure = _failure_of(
                [*compiler.command, *flags, "-o", str(temporary), *sources, *LINKED]
            )
            if not failure:
                failure = _failure_of([sys.executable, "-c", _LOAD, str(temporary)])
            if not failure:
                temporary.replace(target)
                return Outcome(target, f"kvferry: {target.name} built with {compiler.name}")
            failures.append(f"{compiler.name}: {failure}")
    finally:
        temporary.unlink(missing_ok=True)
    target.unlink(missing_ok=True)
    reason = "; ".join(failures) or ("no C compiler" if sources else "no C files")
    line = f"kvferry: {target.name} not built ({reason}): Python moves the bytes"
    return Outcome(None, line, no_compiler=not failures)


_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
"""In a process of its own: a library for another processor may end it."""


def _failure_of(command: list[str]) -> str:
    """Why `command` failed, in one line; empty when it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            timeout=COMPILE_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return [*errors, *lines[-1:], f"exit status {done.returncode}"][0]


def platform_of(library: Path) -> str:
    """The platform tag of a wheel with `library`: the oldest glibc that has all it needs.

    A library that needs anything else than glibc is tagged for Linux hosts like this one.
    """
    machine = platform.machine()
    if library.read_bytes()[:5] != ELF_64:
        return f"linux_{machine}"
    needed, versions = dependencies(library)
    of_glibc = [tuple(map(int, name[6:].split("."))) for name in versions
                if name.startswith("GLIBC_") and name[6:7].isdigit()]  # fmt: skip
    if "GLIBC_ABI_DT_RELR" in versions:  # a way to link, not a symbol: glibc has it since 2.36
        of_glibc.append((2, 36))
    others = [name for name in needed if not name.startswith(ON_EVERY_HOST)]
    is_musl = any("musl" in name for name in needed)
    if others or is_musl or not of_glibc:
        return f"linux_{machine}"
    major, minor = max(OLDEST_GLIBC, *(version[:2] for version in of_glibc))
    return f"manylinux_{major}_{minor}_{machine}"


ELF_64 = b"\x7fELF\x02"
_DYNAMIC, _VERSIONS_NEEDED, _NEEDED = 6, 0x6FFFFFFE, 1


def dependencies(library: Path) -> tuple[set[str], set[str]]:
    """Names of the libraries that a 64-bit ELF file needs, and of the versions of their symbols."""
    image = library.read_bytes()
    order = "<" if image[5] == 1 else ">"

    def unpack(layout: str, place: int) -> tuple[int, ...]:
        return struct.unpack_from(order + layout, image, place)

    (table,) = unpack("Q", 0x28)
    size, count = unpack("HH", 0x3A)
    # name, type, flags, address, offset, size, link, …
    sections = [unpack("IIQQQQII", table + size * number) for number in range(count)]

    def text(section: int, place: int) -> str:
        start = sections[section][4] + place
        return image[start : image.index(b"\0", start)].decode()

    needed, versions = set(), set()
    for _, kind, _, _, offset, length, link, info in sections:
        if kind == _DYNAMIC:
            entries = (unpack("qQ", place) for place in range(offset, offset + length, 16))
            needed |= {text(link, value) for tag, value in entries if tag == _NEEDED}
        elif kind == _VERSIONS_NEEDED:
            for _ in range(info):
                _, names, _, first, following = unpack("HHIII", offset)
                place = offset + first
                for _ in range(names):
                    _, _, _, name, step = unpack("IHHII", place)
                    versions.add(text(link, name))
                    place += step
                offset += following
    return needed, versions


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m remote_server.native.build",
        description=f"Compile {LIBRARY} beside its sources.",
        epilog="$CC, cc, gcc, clang and Python's package ziglang are tried, in this order. "
        "Warnings are errors.",
    )
    parser.add_argument("--optional", action="store_true", help="a missing compiler is no failure")
    flags = parser.parse_args(arguments)
    outcome = build(SOURCES / LIBRARY, strict=True)
    print(outcome.line, flush=True)
    return 0 if outcome.library or (flags.optional and outcome.no_compiler) else 1


if __name__ == "__main__":
    sys.exit(main())
