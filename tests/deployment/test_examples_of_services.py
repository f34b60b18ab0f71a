"""The container file and the systemd unit are true: commands, settings, times, sizes."""

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from deployment_fixtures import REPOSITORY
from packaging.specifiers import SpecifierSet
from typed_commands import flags_of

from remote_server.cli.serving.serve_all import conflicts
from remote_server.server import settings
from remote_server.server.config import ServerConfig
from remote_server.values import MiB, parse_bytes

pytestmark = pytest.mark.real_time

Steps = list[tuple[str, str]]

EXAMPLES = REPOSITORY / "examples"
UNIT = EXAMPLES / "systemd" / "kvferry.service"
SETTINGS = EXAMPLES / "systemd" / "kvferry.toml"
CONTAINER = EXAMPLES / "container" / "Containerfile"
# Beside blocks: Python, connections, reads from the disk.
BESIDE_MEMORY = 512 * MiB
# Beside the drain: the last replies, the disk's threads.
BESIDE_DRAIN_S = 5.0


def settings_of(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> ServerConfig:
    """What `kvferry serve ARGUMENTS` would use, read as the command reads it. An unknown flag
    ends in `SystemExit`, an unknown or wrong setting in `ConfigError`."""
    return settings.choose(flags_of("serve", arguments), environment or {}).config


# ── systemd ──────────────────────────────────────────────────────────────────────────────


def service_of(unit: Path) -> dict[str, str]:
    """`[Service]` by name. No name is there twice: that would be an error here."""
    parser = configparser.ConfigParser(interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    return dict(parser["Service"])


@pytest.fixture
def unit() -> Mapping[str, str]:
    return service_of(UNIT)


@pytest.fixture
def unit_settings(unit: Mapping[str, str]) -> ServerConfig:
    _, command, *arguments = shlex.split(unit["ExecStart"])
    assert command == "serve"
    ours = [str(SETTINGS) if word == "/etc/kvferry/kvferry.toml" else word for word in arguments]
    assert str(SETTINGS) in ours
    return settings_of(ours)


def test_every_setting_of_the_example_is_valid_and_in_force(unit_settings: ServerConfig):
    given = tomllib.loads(SETTINGS.read_text())
    assert given
    for name, value in given.items():
        wanted = parse_bytes(value, name) if name in ("memory", "disk_bytes") else value
        assert getattr(unit_settings, name) == wanted


def test_the_example_with_what_it_leaves_in_comments_is_valid_as_well(tmp_path: Path):
    text = SETTINGS.read_text()
    hidden = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    names = {line.partition(" = ")[0] for line in hidden}
    assert names == {"bind", "keys", "tenants"}
    kept = [line for line in text.splitlines() if line.partition(" = ")[0] not in names]
    (tmp_path / "all.toml").write_text("\n".join([*kept, *hidden]))
    config = settings_of(["--settings", str(tmp_path / "all.toml")])
    assert config.keys and config.bind == "tcp://0.0.0.0:5757"


def check_limits(unit: Mapping[str, str], config: ServerConfig) -> None:
    """Time for a drain, memory for the blocks, and the disk's folder."""
    assert float(unit["TimeoutStopSec"]) >= config.drain_timeout_s + BESIDE_DRAIN_S
    assert unit["KillSignal"] == "SIGTERM"
    limit = parse_bytes(unit["MemoryMax"] + "iB", "MemoryMax")
    assert limit >= config.memory + BESIDE_MEMORY
    assert config.disk == f"/var/lib/{unit['StateDirectory']}"


def test_the_unit_has_time_for_a_drain_memory_for_the_blocks_and_the_disk_s_folder(
    unit: Mapping[str, str], unit_settings: ServerConfig
):
    check_limits(unit, unit_settings)


def test_the_unit_takes_nothing_that_the_server_needs(unit: Mapping[str, str]):
    """Peers' users for shared memory, their network for its socket, /proc/meminfo for the check
    of `memory`; netlink for libzmq's interface names."""
    assert {"PrivateUsers", "PrivateNetwork", "ProcSubset"}.isdisjoint(unit)
    families = unit["RestrictAddressFamilies"].split()
    assert {"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} <= set(families)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_finds_nothing_wrong_with_the_unit(unit: Mapping[str, str], tmp_path: Path):
    """Of a copy that starts a program which exists here."""
    program = shlex.split(unit["ExecStart"])[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(f"={program} ", "=/bin/true "))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line or str(copy) in line]
    assert (done.returncode, ours) == (0, []), done.stderr


def test_the_unit_of_a_fleet_is_that_of_one_server_but_for_its_section(unit: Mapping[str, str]):
    others = service_of(UNIT.with_name("kvferry@.service"))
    assert {name for name in {**unit, **others} if unit.get(name) != others.get(name)} == {
        "ExecStart", "StateDirectory",
    }  # fmt: skip
    fleet = SETTINGS.with_name("fleet.toml")
    _, command, *arguments = shlex.split(others["ExecStart"])
    assert command == "serve" and arguments[-2:] == ["--name", "%i"]
    names = tomllib.loads(fleet.read_text())["servers"]
    configs = {name: settings_of(["--settings", str(fleet), "--name", name]) for name in names}
    assert len(configs) == 2 and conflicts(configs) == []
    for name, config in configs.items():
        check_limits({key: word.replace("%i", name) for key, word in others.items()}, config)


# ── container ────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def steps() -> Steps:
    """Instructions of the container file in their order, continued lines joined."""
    lines = [line for line in CONTAINER.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in whole) if name
    ]


def last(steps: Steps, name: str) -> str:
    return [rest for each, rest in steps if each == name][-1]


def test_the_container_runs_serve_and_gets_the_signals_itself(steps: Steps):
    """The form with brackets: no shell between the signal and the server."""
    program: str
    arguments: list[str]
    program, *arguments = [*json.loads(last(steps, "ENTRYPOINT")), *json.loads(last(steps, "CMD"))]
    assert (program, arguments[0]) == ("kvferry", "serve")
    assert settings_of(arguments[1:]) == ServerConfig()
    assert last(steps, "STOPSIGNAL") == "SIGTERM"


def test_the_container_has_a_user_of_its_own_when_it_runs(steps: Steps):
    names, user = [name for name, _ in steps], last(steps, "USER")
    assert f"useradd --system --uid 5757 --no-create-home --shell /usr/sbin/nologin {user}" in last(
        steps, "RUN"
    )
    assert "RUN" not in names[names.index("USER") :]


def test_the_container_is_built_from_files_that_exist_and_a_python_that_fits(steps: Steps):
    copied = [
        word
        for name, rest in steps
        if name == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    packages = ["kv_connector", "remote_server"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"], *packages}
    assert needed <= set(copied)
    assert all((REPOSITORY / name).exists() for name in copied)
    for name, base in steps:
        if name == "FROM":
            version = base.split()[0].partition(":")[2].partition("-")[0]
            assert SpecifierSet(project["requires-python"]).contains(f"{version}.0"), base


def health_check(steps: Steps) -> list[str]:
    words = last(steps, "HEALTHCHECK").partition("CMD ")[2]
    program, *arguments = json.loads(words)
    assert program == "python"
    return [sys.executable, *arguments]


def test_the_health_check_asks_the_server_and_believes_its_answer(
    steps: Steps, serving: Mapping[str, str]
):
    def status(admin: str) -> int:
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        done = subprocess.run(health_check(steps), env=env | {"KVFERRY_ADMIN": admin}, timeout=60,
                              capture_output=True, check=False)  # fmt: skip
        return done.returncode

    assert status(serving["admin"]) == 0
    assert status(serving["admin"].removeprefix("http://")) == 0
    assert status("http://127.0.0.1:1") != 0
    assert "'127.0.0.1:5758'" in " ".join(health_check(steps))
    assert ServerConfig().admin == "http://127.0.0.1:5758"


def test_docker_waits_for_longer_than_a_drain_takes():
    found = re.findall(r"--stop-timeout (\d+)", CONTAINER.read_text() + readme("container"))
    assert len(found) >= 2
    assert all(float(s) >= ServerConfig().drain_timeout_s + BESIDE_DRAIN_S for s in found)


# ── commands in the texts ────────────────────────────────────────────────────────────────


def readme(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


def commands_in(text: str) -> Iterator[list[str]]:
    """The arguments of each `kvferry serve …`, comments and continued lines included."""
    joined = re.sub(r"\\\n#?\s*", "", text)
    for line in joined.splitlines():
        for found in re.findall(r"kvferry serve((?: +(?:--)?[\w./:-]+)*)", line):
            yield found.split()


@pytest.mark.parametrize("name", ["container", "systemd"])
def test_the_commands_that_are_told_are_understood(name: str):
    text = "\n".join(file.read_text() for file in sorted((EXAMPLES / name).iterdir()))
    commands = [one for one in commands_in(text) if one and "FILE" not in one]
    assert commands
    for arguments in commands:
        if "%i" in arguments or "--name" in arguments:
            continue  # of the unit of a fleet
        here = [str(SETTINGS) if word.endswith("kvferry.toml") else word for word in arguments]
        settings_of(here)
