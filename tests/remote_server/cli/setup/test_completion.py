"""The completion of a shell, tried in bash itself."""

import shutil
import subprocess
import sys

import pytest

from remote_server.cli.__main__ import main
from remote_server.cli.commands import COMMANDS
from remote_server.cli.setup.completion import SHELLS

pytest.importorskip("shtab", reason="shtab is not installed")


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """The words that bash offers behind a line."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    script = tmp_path_factory.mktemp("completion") / "kvferry"
    with script.open("w") as file:
        command = [sys.executable, "-m", "remote_server.cli", "completion", "bash"]
        subprocess.run(command, stdout=file, check=True)

    def complete(line: str) -> set[str]:
        words = line.split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        code = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_kvferry;"
            "printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        ran = subprocess.run([bash, "-c", code], capture_output=True, text=True, check=True)
        return set(ran.stdout.split())

    return complete


def test_commands_flags_and_choices_are_offered(complete):
    assert set(COMMANDS) <= complete("kvferry ")
    assert {"--memory", "--disk", "--eviction"} <= complete("kvferry serve --")
    assert complete("kvferry serve --eviction ") == {"learned", "lru"}
    assert complete("kvferry completion ") >= set(SHELLS)


def test_files_are_offered_where_a_file_is_wanted(complete, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.toml").touch()
    assert complete("kvferry serve --settings fl") == {"fleet.toml"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "--disk-write-rate" in capsys.readouterr().out


def test_without_its_library_one_line_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "kvferry completion: shtab is missing: pip install shtab\n"
