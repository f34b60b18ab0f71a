"""`kvferry init`: what it writes starts, and nothing that is there is overwritten."""

import json
import os
import pty
import re
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from typed_commands import flags_of

from kv_connector.config import ConnectorConfig, read_config
from remote_server.cli.__main__ import main
from remote_server.cli.setup.init_files import SETTINGS
from remote_server.fleet.server_list import read_list
from remote_server.server import settings
from remote_server.values import GiB, MiB, parse_bytes

pytestmark = pytest.mark.real_time

REPOSITORY = Path(__file__).resolve().parents[4]
SYSTEMD = REPOSITORY / "examples" / "systemd"
MODEL = "org/model-7b"


@pytest.fixture
def init(tmp_path, capsys):
    """Run it with flags; the folder, when it wrote one."""

    def init(*flags: str, folder: str = "made") -> Path:
        path = tmp_path / folder
        assert main(["init", str(path), "--model", MODEL, *flags]) == 0, capsys.readouterr().err
        assert str(path) in capsys.readouterr().out
        return path

    return init


def chosen(folder: Path, *flags: str):
    arguments = ["--settings", str(folder / SETTINGS), *flags]
    return settings.choose(flags_of("serve", arguments), {}).config


def command_of(folder: Path) -> list[str]:
    """The words of the engine's command, as a shell reads them."""
    show = 'vllm() { for each; do printf \'%s\\0\' "$each"; done; }; exec() { "$@"; }; '
    script = (folder / "vllm.sh").read_text()
    ran = subprocess.run(["bash", "-c", show + script, "vllm.sh", "--port", "1"],
                         capture_output=True, text=True, check=True)  # fmt: skip
    return ran.stdout.split("\0")[:-1]


def connector_of(folder: Path) -> ConnectorConfig:
    words = command_of(folder)
    assert words[:2] == ["serve", MODEL] and words[-2:] == ["--port", "1"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KVFerryConnector"
    return read_config(ConnectorConfig, transfer["kv_connector_extra_config"], "extra")


# ── one host ─────────────────────────────────────────────────────────────────────────────


def started(folder: Path, *flags: str) -> Iterator[str]:
    """The ready line of a server with the settings in the folder, on a port of its own."""
    command = [sys.executable, "-m", "remote_server.cli", "serve", "--settings",
               str(folder / SETTINGS), "--admin", "off", *flags]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_the_server_of_one_host_starts_and_its_engine_finds_it(init):
    folder = init("--memory", "64MiB")
    config = chosen(folder)
    assert (config.bind, config.memory, config.keys) == ("tcp://127.0.0.1:5757", 64 * MiB, "")
    assert connector_of(folder).server == config.bind
    for line in started(folder, "--bind", "127.0.0.1:*"):
        assert line.startswith("kvferry ready on tcp://127.0.0.1:") and "64.0 MiB" in line


def test_a_server_with_disk_and_keys_starts_and_lets_its_tenants_in(init, tmp_path, capsys):
    disk = tmp_path / "blocks"
    folder = init("--memory", "64MiB", "--disk", str(disk), "--disk-bytes", "64MiB",
                  "--keys", "blue,red")  # fmt: skip
    for line in started(folder, "--bind", "127.0.0.1:*"):
        assert "disk 64.0 MiB" in line
        endpoint = re.findall(r"tcp://\S+", line)[0]
        for name in ("blue", "red"):
            address = f"{endpoint}?keys={folder}/keys/client-{name}.key"
            assert main(["stats", "--server", address, "--timeout-s", "60"]) == 0
            assert re.search(r"^disk +0 B +32\.0 MiB", capsys.readouterr().out, re.MULTILINE)
    secret = [file for file in (folder / "keys").iterdir() if file.suffix != ".toml"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secret} == {0o600}


def test_every_setting_has_its_explanation(init, tmp_path):
    folder = init("--disk", str(tmp_path / "d"), "--bucket", "s3://b/p", "--keys", "x")
    text = (folder / SETTINGS).read_text()
    explained = settings.described(type(chosen(folder)))
    for name, value in msgspec.toml.decode(text).items():
        about = text[: text.index(f"\n{name} = ")].rpartition("\n\n")[2].replace("\n# ", " ")
        assert about == f"# {explained[name]}", (name, value)


# ── several hosts ────────────────────────────────────────────────────────────────────────


def test_servers_of_several_hosts_have_the_names_in_the_engines_list(init, tmp_path):
    folder = init("--hosts", "cache-a.x,10.0.0.9", "--keys", "blue", "--disk", str(tmp_path))
    connector = connector_of(folder)
    members = read_list(connector.server).members
    assert [(one.name, one.endpoint) for one in members] == [
        ("cache-1", "tcp://10.0.0.9:5757"), ("cache-a", "tcp://cache-a.x:5757"),
    ]  # fmt: skip
    assert {one.keys for one in members} == {f"{folder}/keys/client-blue.key"}
    for one in members:
        assert chosen(folder, "--name", one.name).bind == "tcp://0.0.0.0:5757"
    assert "--name %i" in (folder / "kvferry@.service").read_text()


@pytest.mark.parametrize(
    ("host", "bind"),
    [("[::1]", "tcp://[::1]:5757"), ("[2001:db8::1]", "tcp://[::]:5757"),
     ("localhost", "tcp://127.0.0.1:5757"), ("10.0.0.7", "tcp://0.0.0.0:5757")],
)  # fmt: skip
def test_a_server_listens_where_the_engines_look_for_it(init, host, bind):
    folder = init("--hosts", host, "--keys", "x")
    assert chosen(folder).bind == bind
    assert connector_of(folder).server.startswith(f"tcp://{host}:5757")


@pytest.mark.parametrize("name", ["a b", "it's", "a&b", "a?b", "{1..2}", "50%"])
def test_a_folder_that_a_unit_or_an_address_reads_otherwise_is_refused(tmp_path, capsys, name):
    assert main(["init", str(tmp_path / name), "--model", MODEL]) == 2
    assert "letters, digits" in capsys.readouterr().err and not (tmp_path / name).exists()


def test_the_memory_of_a_container_is_what_its_limit_gives(init, monkeypatch):
    monkeypatch.setattr("remote_server.cli.setup.init_answers.most_memory", lambda: 8 * GiB)
    assert chosen(init()).memory == 2 * GiB


def test_the_steps_keep_the_client_key_from_the_servers_user(init):
    steps = (init("--keys", "blue") / "README.md").read_text()
    assert "chown -R" not in steps and re.search(r"chown kvferry: \S+/server\.\*", steps)
    assert "First move what is in" in steps, "the folder of this test is below /tmp"


@pytest.mark.parametrize(
    ("hosts", "has_key"),
    [("cache-a", True), ("localhost", True), ("127.0.0.1,127.0.0.2", True), ("127.0.0.1", False)],
)
def test_hosts_have_a_key_also_when_none_was_asked_for_but_for_the_engines_own(
    init, hosts, has_key
):
    assert (init("--hosts", hosts) / "keys" / "client-engines.key").exists() is has_key


# ── systemd ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("unit", "flags"),
    [("kvferry.service", ()), ("kvferry@.service", ("--hosts", "a,b", "--keys", "x"))],
)
def test_the_unit_is_the_example_with_other_paths_and_sizes(init, unit, flags, tmp_path):
    disk = tmp_path / "blocks"
    folder = init("--memory", "3GiB", "--disk", str(disk), *flags)
    ours, example = ((at / unit).read_text().splitlines() for at in (folder, SYSTEMD))
    changed = [line for line in ours if line not in example]
    names = [line.partition("=")[0] for line in changed if not line.startswith("#")]
    assert set(names) <= {"ExecStart", "MemoryMax", "ReadWritePaths"}
    values = dict(line.split("=", 1) for line in changed if not line.startswith("#"))
    assert values["MemoryMax"] == "5G" and values["ReadWritePaths"] == str(disk)
    words = shlex.split(values["ExecStart"])
    assert words[1:4] == ["serve", "--settings", str(folder / SETTINGS)]
    assert Path(words[0]).name == "kvferry"


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────


def test_the_overlay_has_the_sizes_of_the_answers_and_every_file_that_it_names(init):
    folder = init("--for", "kubernetes", "--hosts", "3", "--memory", "8GiB", "--disk", "yes",
                  "--disk-bytes", "100GiB", "--bucket", "s3://kv/p")  # fmt: skip
    whole = yaml.safe_load((folder / "kustomization.yaml").read_text())
    named = [*whole["resources"], *(one["path"] for one in whole["patches"]),
             *(file for one in (*whole["configMapGenerator"], *whole["secretGenerator"])
               for file in one["files"])]  # fmt: skip
    assert {name for name in named if not (folder / name).exists()} == set()
    sizes = yaml.safe_load((folder / "sizes.yaml").read_text())["spec"]
    (container,) = sizes["template"]["spec"]["containers"]
    (claim,) = sizes["volumeClaimTemplates"]
    config = chosen(folder)
    storage = parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B", "storage")
    assert sizes["replicas"] == 3 and config.bucket == "s3://kv/p"
    limit = parse_bytes(container["resources"]["limits"]["memory"] + "B", "limit")
    assert limit == config.memory + 2 * GiB and config.disk_bytes <= 0.96 * storage
    assert [one.name for one in read_list(connector_of(folder).server).members] == [
        "kvferry-0", "kvferry-1", "kvferry-2",
    ]  # fmt: skip
    assert "value: s3://kv/p" in (folder / "bucket.yaml").read_text()


# ── what is there, what is wrong ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [SETTINGS, "keys", "vllm.sh"])
def test_nothing_is_overwritten_and_nothing_is_written_beside_it(tmp_path, capsys, name):
    (tmp_path / name).symlink_to("/nowhere")
    assert main(["init", str(tmp_path), "--model", MODEL, "--keys", "x"]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((), "--model is missing"),
        (("--model", "m", "--hosts", "3"), "--hosts 3: name them"),
        (("--model", "m", "--hosts", "a", "--keys", "none"), "--keys is missing"),
        (("--model", "m", "--hosts", "a b:c"), "--hosts"),
        (("--model", "m", "--hosts", "a,a.x", "--keys", "x"), "has the name 'a' too"),
        (("--model", "m", "--keys", "Blue"), "--keys 'Blue'"),
        (("--model", "m", "--memory", "much"), "--memory: 'much' is not a size"),
        (("--model", "m", "--disk", "here"), "--disk here: a path from the root"),
        (("--model", "m", "--bucket", "ftp://x"), "bucket"),
        (("--model", "m", "--device", "tpu"), "--device 'tpu'"),
        (("--model", "m", "--memory", "1KiB"), "memory: 1024 bytes is below"),
        (("--model", "m", "--disk", "/d", "--disk-bytes", "1"), "--disk-bytes: 1 B is below"),
        (("--model", "m", "--disk", "/my disk"), "--disk '/my disk': letters"),
        (("--model", "m", "--for", "kubernetes", "--hosts", "a"), "their number"),
    ],
)
def test_a_wrong_answer_is_one_line_and_writes_nothing(tmp_path, capsys, flags, complaint):
    assert main(["init", str(tmp_path / "made"), *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.startswith("kvferry init: ") and error.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_on_a_terminal_it_asks_for_what_no_flag_gives(tmp_path):
    main_end, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "remote_server.cli", "init", str(tmp_path / "made"), "--memory",
         "64MiB"],
        stdin=other_end, stdout=other_end, stderr=other_end, cwd=REPOSITORY,
    )  # fmt: skip
    os.close(other_end)
    os.write(main_end, f"{MODEL}\ncpu\n1\nnone\n\nblue\n".encode())
    assert process.wait(60) == 0
    printed = os.read(main_end, 1 << 16).decode()
    os.close(main_end)
    assert printed.index("Model") < printed.index("gpu or cpu") < printed.index("Hosts")
    assert "Memory" not in printed, "a flag gave it"
    assert (tmp_path / "made" / "keys" / "client-blue.key").exists()
    assert "--dtype" in command_of(tmp_path / "made")
