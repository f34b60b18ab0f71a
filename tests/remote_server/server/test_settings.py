"""Sources of settings, their order, and the message for a wrong one."""

import logging
import tomllib

import msgspec
import pytest
from typed_commands import parser_for

from remote_server.cli.__main__ import main
from remote_server.errors import ConfigError
from remote_server.server import settings
from remote_server.server.config import ServerConfig
from remote_server.server.settings import described
from remote_server.values import GiB


@pytest.fixture(scope="module")
def parser():
    return parser_for("serve")


@pytest.fixture
def choose(parser, tmp_path):
    """The settings that flags, variables and a file give together."""

    def choose(*flags, file=None, **environment):
        if file is not None:
            (tmp_path / "kvferry.toml").write_text(file)
            flags = (*flags, "--settings", str(tmp_path / "kvferry.toml"))
        return settings.choose(parser.flags_in(flags), environment)

    return choose


def test_flags_win_over_variables_over_the_file_over_the_default(choose):
    file = 'memory = "1GiB"\ndisk_bytes = "1GiB"\ndrain_timeout_s = 1\n'
    chosen = choose("--memory", "3GiB", file=file, KVFERRY_MEMORY="2GiB", KVFERRY_DISK_BYTES="2GiB")
    config = chosen.config
    assert (config.memory, config.disk_bytes, config.drain_timeout_s) == (3 * GiB, 2 * GiB, 1.0)
    assert chosen.origins["memory"] == "flag"
    assert chosen.origins["disk_bytes"] == "environment"
    assert chosen.origins["drain_timeout_s"].startswith("file ")
    assert chosen.origins["bind"] == "default"


def test_every_setting_can_be_given_in_every_way(choose):
    """By its own name, and arrives with the type it has."""
    default = ServerConfig()
    for field in msgspec.structs.fields(ServerConfig):
        value = getattr(default, field.name)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        line = text if isinstance(value, bool | int | float) else f'"{text}"'
        by_file = choose(file=f"{field.name} = {line}\n")
        by_variable = choose(**{f"KVFERRY_{field.name.upper()}": text})
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            by_flag = choose(flag if value else flag.replace("--", "--no-", 1))
        else:
            by_flag = choose(f"{flag}={text}")
        for way in (by_file, by_variable, by_flag):
            assert way.config == default
            assert way.origins[field.name] != "default"


def test_what_is_printed_is_a_file_that_gives_the_same_again(choose, capsys):
    chosen = choose("--memory", "3GiB", "--no-populate", "--bind", "tcp://127.0.0.1:*")
    again = choose(file=chosen.as_toml())
    assert again.config == chosen.config
    assert "# flag" in chosen.as_toml()
    assert tomllib.loads(chosen.as_toml())["populate"] is False
    assert main(["serve", "--print-config", "--memory", "2GiB"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["memory"] == 2 * GiB


def test_what_is_printed_can_be_read_whatever_the_text_and_the_number(choose):
    for flags in (["--disk", "/\x7f\t\u2028"], ["--max-connections", "9" * 18]):
        chosen = choose(*flags)
        assert choose(file=chosen.as_toml()).config == chosen.config
    with pytest.raises(ConfigError, match=r"^max_connections: "):
        choose("--max-connections", "9" * 19)  # a file cannot have it either


SEVERAL = 'memory = "2GiB"\n[servers.a]\n[servers.b]\nmemory = "4GiB"\n'


def test_one_of_several_servers_is_chosen_by_name(choose):
    assert choose("--name", "a", file=SEVERAL).config.memory == 2 * GiB
    assert choose("--name", "b", file=SEVERAL).config.memory == 4 * GiB
    assert choose(file=SEVERAL, KVFERRY_NAME="b").config.memory == 4 * GiB
    assert choose("--name", "a", file=SEVERAL, KVFERRY_NAME="b").config.memory == 2 * GiB


def test_the_table_of_a_server_names_it(choose):
    chosen = choose("--name", "b", file=SEVERAL)
    assert chosen.config.name == "b"
    assert choose("--name", "b", file='memory = "2GiB"').config.name == "b"
    assert choose("--name", "b").config.name == choose(KVFERRY_NAME="b").config.name == "b"
    assert choose(file='name = "b"\n').config.name == "b" and choose().config.name == ""


@pytest.mark.parametrize(
    ("flags", "file", "complaint"),
    [
        ((), SEVERAL, "several servers, a, b: choose one by --name"),
        (("--name", "c"), SEVERAL, r"no \[servers.c\]; it has a, b"),
        (("--name", "a b"), None, r"name: the server has the name 'a b': a name has 1 to 63"),
        (("--name", "a"), '[servers.a]\nname = "b"\n', r"\[servers.a\] has the name 'b'"),
        ((), "memroy = 1", "unknown setting 'memroy'; did you mean 'memory'"),
        ((), "memory = ", "not TOML"),
        ((), "servers = 3", r"\[servers.NAME\]"),
        ((), "memory = true", "memory: True where SIZE is wanted"),
        ((), 'populate = "maybe"', "populate: 'maybe' is neither true nor false"),
        (("--drain-timeout-s", "soon"), None, r"drain_timeout_s: 'soon' .* \(flag\)"),
        (("--settings", "/nowhere.toml"), None, "cannot read /nowhere.toml"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(choose, flags, file, complaint):
    with pytest.raises(ConfigError, match=complaint):
        choose(*flags, file=file)


def test_a_wrong_variable_is_named_as_one(choose):
    with pytest.raises(ConfigError, match=r"memory: 'much' .* \(environment\)"):
        choose(KVFERRY_MEMORY="much")


def test_variables_that_are_no_settings_are_left_alone_and_near_ones_told(choose, caplog):
    """A container platform sets KVFERRY_PORT for a service of that name."""
    caplog.set_level(logging.WARNING)
    environment = {"KVFERRY_PORT": "tcp://10.0.0.1:5757", "KVFERRY_MEMROY": "8GiB"}
    assert choose(**environment).config == ServerConfig()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "KVFERRY_MEMROY is not a setting; did you mean KVFERRY_MEMORY?"


def test_there_are_at_most_30_and_each_says_what_it_is():
    assert len(described(ServerConfig)) <= 30


def test_a_field_without_words_is_found():
    class Silent(msgspec.Struct):
        said: int = 1
        """It."""
        unsaid: int = 2

    with pytest.raises(LookupError, match="unsaid"):
        described(Silent)
