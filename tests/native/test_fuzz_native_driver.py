"""Random jobs of the mover (`driver.c`) and messages of lanes (`lanes_driver.c`) from several
threads, built with each sanitizer."""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest

from remote_server.certificate import make_certificate, parse_certificate
from remote_server.native import why_no_tls

pytest_plugins = ["fuzzing"]

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "remote_server" / "native"
FLAGS = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "thread": ["-fsanitize=thread"],
}


def environment() -> dict[str, str]:
    """Without preloaded libraries: vLLM preloads an allocator, and a sanitizer must come first."""
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return kept | {"TSAN_OPTIONS": "halt_on_error=1"}


def compiler_with(flags: list[str], folder: Path) -> str:
    """One whose programs with `flags` run here; without one the test is skipped."""
    named = [name for name in ("gcc", "clang") if shutil.which(name)]
    if not named:
        pytest.skip("there is neither gcc nor clang")
    program = folder / "program"
    reason = ""
    for name in named:
        command = [name, *flags, "-pthread", "-x", "c", "-", "-o", str(program)]
        built = subprocess.run(
            command, input="int main(void) { return 0; }", text=True, capture_output=True,
            check=False, timeout=60,
        )  # fmt: skip
        if not built.returncode:
            ran = subprocess.run(
                [program], text=True, capture_output=True, check=False, timeout=60,
                env=environment(),
            )  # fmt: skip
            if not ran.returncode:
                return name
            built = ran
        reason = f"{name} {flags[0]}: {(built.stderr.split(chr(10)) or [''])[0]:.120}"
    pytest.skip(reason)


def certificate_files(folder: Path) -> list[Path]:
    """In DER: a certificate, its key, and the SHA-256 of the certificate."""
    if reason := why_no_tls():
        pytest.skip(reason)
    made = parse_certificate(make_certificate(), "made")
    parts = (made.certificate, made.private_key, made.pin)
    files = [folder / name for name in ("certificate", "key", "digest")]
    for file, part in zip(files, parts, strict=True):
        file.write_bytes(part)
    return files


@pytest.fixture(scope="module", params=SANITIZERS)
def drivers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with each program, built with one sanitizer. The library is compiled once."""
    folder, flags = tmp_path_factory.mktemp(request.param), SANITIZERS[request.param]
    command = [compiler_with(flags, folder), *FLAGS, *flags, f"-I{SOURCES}"]
    sources = sorted(SOURCES.glob("*.c"))
    subprocess.run([*command, "-c", *sources], cwd=folder, check=True, timeout=240)
    objects = [folder / f"{source.stem}.o" for source in sources]
    for program in ("driver", "lanes_driver"):
        subprocess.run(
            [*command, "-o", folder / program, HERE / f"{program}.c", *objects, "-ldl"],
            check=True, timeout=120,
        )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("program", "encrypts"), [("driver", False), ("lanes_driver", False), ("lanes_driver", True)]
)
def test_jobs_from_several_threads_end_once_and_right(fuzz, drivers, tmp_path, program, encrypts):
    is_short = fuzz.seconds is None
    seconds, seed = (0.2, 1) if is_short else (fuzz.seconds, secrets.randbelow(1 << 32))
    done = subprocess.run(
        [
            drivers / program, f"{seconds}", f"{seed}",
            *(certificate_files(tmp_path) if encrypts else []),
        ],
        capture_output=True, text=True, check=False, timeout=200 + 2 * seconds,
        env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}: {done.stderr[:8000]}"
    print(done.stdout.strip())
