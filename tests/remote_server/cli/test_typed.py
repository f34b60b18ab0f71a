"""What `kvferry` prints of itself: help pages, the version, and mistakes in two lines."""

import io
import re
import subprocess
import sys
from importlib.metadata import version

import msgspec
import pytest
from typed_commands import flags_of, parser_for

from remote_server.cli.__main__ import main
from remote_server.cli.commands import COMMANDS, load, module_of
from remote_server.cli.output import agreed
from remote_server.server import settings
from remote_server.server.config import GROUPS, ServerConfig


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {version('kvferry')}\n"


def test_the_list_of_commands_imports_none_of_them():
    code = (
        "import sys; from remote_server.cli.__main__ import main; main(['--help']);"
        "print(*sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert not loaded & {"zmq", "numpy", "msgspec", "aiohttp", "prometheus_client"}
    for name in COMMANDS:
        assert module_of(name) not in loaded
        assert re.search(rf"^ {{4}}{name} ", ran.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_ends_with_examples_that_are_right(name: str):
    page = parser_for(name).format_help()
    assert page.startswith(f"usage: kvferry {name}")
    lines = page.partition("\nexamples:\n")[2].replace("\\\n", " ").splitlines()
    assert lines
    for line in lines:
        command, _, _ = line.partition(" #")
        command = re.split(r" [|>] ", command)[0]
        program, typed, *arguments = command.replace("'", "").split()
        assert (program, typed) == ("kvferry", name)
        if "…" not in command:
            flags_of(name, arguments)  # a wrong flag ends in SystemExit


@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_help_pages_fit_the_terminal_and_no_more_than_100_columns(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for name in COMMANDS:
        page = parser_for(name).format_help().partition("\nexamples:\n")[0]
        widest = max(map(len, page.splitlines()))
        assert widest <= max(min(int(columns), 100), 78), name  # an address has no break


def test_choices_sizes_and_files_are_shown_as_such():
    page = parser_for("serve").format_help()
    for shown in ("--eviction {learned,lru}", "--memory SIZE", "--disk DIR", "--keys FILE",
                  "--bind ADDRESS", "--bucket URL", "--ttl-s SECONDS",
                  "--log-level {debug,info,warning,error}"):  # fmt: skip
        assert f"  {shown}" in page
    assert "TEXT" not in page and "none)" not in page.replace("(default: none)", "", 1)


def test_every_setting_is_in_one_group_of_the_help_and_of_the_documents():
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(ServerConfig.__struct_fields__)
    page = parser_for("serve").format_help()
    titles = [page.index(f"\n{title}:\n") for title in GROUPS]
    assert titles == sorted(titles)


@pytest.mark.parametrize(
    ("typed", "mistake"),
    [
        (["statz"], "kvferry: unknown command 'statz'; did you mean stats?"),
        (["--versoin"], "kvferry: unknown flag '--versoin'"),
        (["serve", "--memry", "1B"], "kvferry serve: unknown flag --memry; did you mean --memory?"),
        (["bucket", "ls", "file:///x", "--limt=3"], "did you mean --limit?"),
        (["stats", "--wach"], "kvferry stats: unknown flag --wach; did you mean --watch?"),
        (["stats", "all"], "kvferry stats: unexpected argument 'all'"),
        (["keys"], "kvferry keys: missing: DIR"),
        (["completion", "fosh"], "kvferry completion: shell: invalid choice: 'fosh'"),
        (["bench", "--block", "x"], "kvferry bench: --block: 'x' is not a size"),
    ],
)  # fmt: skip
def test_a_mistake_takes_two_lines_of_which_the_second_helps(typed, mistake, capsys):
    try:
        status = main(typed)
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    first, second = printed.err.splitlines()
    assert status == 2 and printed.out == ""
    assert mistake in first
    helped = re.search(r"`(kvferry.*) --help` lists", second)
    assert helped is not None and f" {helped[1]} ".startswith(f" {first.split(':')[0]} ")


@pytest.mark.parametrize(
    ("typed", "helps"),
    [
        (["serve", "--bind", "0.0.0.0:5757"], "`kvferry keys DIR TENANT`"),
        (["serve", "--keys", "server.key"], "`kvferry keys`"),
    ],
)
def test_an_error_names_the_command_that_helps(typed, helps, capsys):
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvferry serve: ") and helps in error and error.count("\n") == 1


def test_the_module_of_one_server_names_itself_in_errors():
    ran = subprocess.run(
        [sys.executable, "-m", "remote_server", "--memory", "x"], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr.startswith("python -m remote_server: memory: 'x' is not a size")


def test_the_processes_of_all_servers_get_the_flags_that_were_typed():
    typed = ["--settings=/x.toml", "--memory=1GiB", "--no-populate", "--ttl-s=3", "--insecure"]
    flags = flags_of("serve", ["--all", *typed])
    assert flags_of("serve", settings.arguments_of(flags)) == flags_of("serve", typed)
    assert {type(value) for value in vars(flags).values()} <= {str, bool, type(None)}


def test_every_command_has_the_form_of_one():
    for name in COMMANDS:
        assert load(name).examples and (load(name).description or COMMANDS[name])


def test_numbers_of_settings_keep_their_types():
    kinds = {settings.bare_kind(one.type) for one in msgspec.structs.fields(ServerConfig)}
    assert kinds == {str, int, float, bool}


def test_a_reader_that_has_closed_the_pipe_ends_a_page_without_a_word():
    code = "import sys; from remote_server.cli.__main__ import main; sys.exit(main(['--help']))"
    ran = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "{sys.executable}" -u -c "{code}" | true'],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")


def test_ctrl_c_while_a_command_is_loaded_is_quiet(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("remote_server.cli.__main__.load", interrupted)
    assert main(["stats"]) == 130 and capsys.readouterr().err == ""


def test_the_end_of_the_answers_is_no(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert not agreed("really?")


@pytest.mark.parametrize("content", [b"# of blue\nserver_key = 'secret'\n", b"secret\xff"])
def test_a_file_that_is_no_token_is_refused_and_never_printed(tmp_path, capsys, content):
    (tmp_path / "client.key").write_bytes(content)
    file = str(tmp_path / "client.key")
    assert main(["drain", "127.0.0.1:1", "--admin-token-file", file]) == 2
    printed = capsys.readouterr()
    assert "one word of ASCII" in printed.err and "secret" not in printed.out + printed.err


def test_a_bench_of_no_server_ends_at_once(capsys):
    assert main(["bench", "--seconds", "0", "--server", "127.0.0.1:1"]) == 3
    assert "no connection to" in capsys.readouterr().err
